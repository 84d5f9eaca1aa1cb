// A store of Gloo in the memory of rank 0, which the other ranks reach over TCP: MASTER_ADDR and MASTER_PORT, as hvdrun
// gives them to its workers. Names begin with the job's id. Connections are not authenticated: use it on networks where
// Gloo itself may be used, which does not authenticate either.
#ifndef NETSTORE_H
#define NETSTORE_H

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gloo/rendezvous/store.h>

inline std::string variable(const char *name) {
  const char *value = getenv(name);
  if (!value || !*value) throw std::runtime_error(std::string(name) + " is not set: this program is a worker of a job here");
  return value;
}

class NetStore : public gloo::rendezvous::Store {
 public:
  explicit NetStore(int rank) : prefix_(variable("TORCHELASTIC_RUN_ID") + "/") {
    if (rank == 0) serve();
    int fd = dial();
    sockaddr_storage own;
    socklen_t length = sizeof own;
    char text[NI_MAXHOST];
    if (getsockname(fd, (sockaddr *)&own, &length) != 0 ||
        getnameinfo((sockaddr *)&own, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
      throw std::runtime_error("the address towards rank 0 is not known");
    address_ = text;
    close(fd);
  }

  // This rank's address towards rank 0.
  const std::string &address() const { return address_; }

  void set(const std::string &key, const std::vector<char> &data) override {
    int fd = dial();
    send_block(fd, std::string("S"));
    send_block(fd, prefix_ + key);
    send_block(fd, std::string(data.begin(), data.end()));
    std::string done;
    bool good = read_block(fd, &done);
    close(fd);
    if (!good) throw std::runtime_error("rank 0 has not taken " + key);
  }

  std::vector<char> get(const std::string &key) override {
    int fd = dial();
    send_block(fd, std::string("G"));
    send_block(fd, prefix_ + key);
    std::string data;
    bool good = read_block(fd, &data);
    close(fd);
    if (!good) throw std::runtime_error("rank 0 does not answer about " + key);
    return std::vector<char>(data.begin(), data.end());
  }

  void wait(const std::vector<std::string> &keys) override { wait(keys, std::chrono::milliseconds(0)); }
  void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &) override {
    for (const auto &key : keys) get(key);
  }

 private:
  enum { MAX_BLOCK = 1 << 16, MAX_ENTRIES = 1 << 16 };

  static void send_block(int fd, const std::string &text) {
    uint32_t n = htonl((uint32_t)text.size());
    std::string all((const char *)&n, sizeof n);
    all += text;
    for (size_t at = 0; at < all.size();) {
      ssize_t sent = send(fd, all.data() + at, all.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) return; // the answer will be missing
      at += (size_t)sent;
    }
  }

  static bool read_all(int fd, char *to, size_t n) {
    for (size_t at = 0; at < n;) {
      ssize_t got = recv(fd, to + at, n - at, 0);
      if (got <= 0) return false;
      at += (size_t)got;
    }
    return true;
  }

  static bool read_block(int fd, std::string *text) {
    uint32_t n;
    if (!read_all(fd, (char *)&n, sizeof n) || ntohl(n) > MAX_BLOCK) return false;
    text->resize(ntohl(n));
    return read_all(fd, &(*text)[0], text->size());
  }

  // Connects to rank 0, which may not listen yet.
  static int dial() {
    std::string host = variable("MASTER_ADDR"), port = variable("MASTER_PORT");
    addrinfo hints = {}, *found;
    hints.ai_socktype = SOCK_STREAM;
    if (int bad = getaddrinfo(host.c_str(), port.c_str(), &hints, &found))
      throw std::runtime_error(host + ": " + gai_strerror(bad));
    for (int tries = 0; tries < 300; tries++) {
      for (addrinfo *at = found; at; at = at->ai_next) {
        int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && connect(fd, at->ai_addr, at->ai_addrlen) == 0) return freeaddrinfo(found), fd;
        if (fd >= 0) close(fd);
      }
      usleep(100 * 1000);
    }
    freeaddrinfo(found);
    throw std::runtime_error("rank 0 cannot be reached at " + host + ":" + port);
  }

  void serve() {
    uint16_t port = htons((uint16_t)atoi(variable("MASTER_PORT").c_str()));
    sockaddr_in6 six = {};
    sockaddr_in four = {};
    six.sin6_family = AF_INET6, six.sin6_port = port;
    four.sin_family = AF_INET, four.sin_port = port;
    int off = 0, on = 1, fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool both = fd >= 0; // IPv6 may be turned off
    if (!both) fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (both) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, both ? (sockaddr *)&six : (sockaddr *)&four, both ? sizeof six : sizeof four) != 0 || listen(fd, 128) != 0)
      throw std::runtime_error("rank 0 cannot listen: " + std::string(strerror(errno)));
    std::thread([fd] {
      static Entries entries; // threads may outlive the store
      for (int client; (client = accept4(fd, nullptr, nullptr, SOCK_CLOEXEC)) >= 0 || errno == EINTR;)
        if (client >= 0) std::thread(answer, client, &entries).detach();
    }).detach();
  }

  struct Entries {
    std::mutex mu;
    std::condition_variable news;
    std::map<std::string, std::string> values;
  };

  static void answer(int fd, Entries *e) {
    std::string what, key, value;
    if (read_block(fd, &what) && read_block(fd, &key)) {
      if (what == "S" && read_block(fd, &value)) {
        std::unique_lock<std::mutex> lock(e->mu);
        bool room = e->values.size() < MAX_ENTRIES;
        if (room) e->values[key] = value;
        e->news.notify_all();
        lock.unlock();
        if (room) send_block(fd, "");
      } else if (what == "G") {
        std::unique_lock<std::mutex> lock(e->mu);
        e->news.wait(lock, [&] { return e->values.count(key) > 0; });
        value = e->values[key];
        lock.unlock();
        send_block(fd, value);
      }
    }
    close(fd);
  }

  std::string prefix_, address_;
};

#endif
