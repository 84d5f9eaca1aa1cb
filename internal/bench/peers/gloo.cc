// The collectives of Gloo, over TCP.  g++ -O2 gloo.cc -lgloo; ./a.out OP SECONDS SIZES [RANKS EMPTY_FOLDER]
// With RANKS the program forks its own ranks, on 127.0.0.1, which meet in the folder; otherwise it is the rank that the variables
// RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT define. All-reduce is Gloo's ring, its default.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <vector>

#include <gloo/allgatherv.h>
#include <gloo/allreduce.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include "measure.h"
#include "netstore.h"

namespace {

using Context = std::shared_ptr<gloo::rendezvous::Context>;

template <typename T>
void allreduce(const Context &ctx, std::vector<T> &v, size_t count, void (*reduce)(void *, const void *, const void *, size_t)) {
  gloo::AllreduceOptions o(ctx);
  o.setOutput(v.data(), count);
  o.setReduceFunction(reduce);
  gloo::allreduce(o);
}

template <typename T>
void broadcast(const Context &ctx, T *data, size_t count) {
  gloo::BroadcastOptions o(ctx);
  o.setRoot(0);
  o.setOutput(data, count);
  gloo::broadcast(o);
}

void barrier(const Context &ctx) {
  gloo::BarrierOptions o(ctx);
  gloo::barrier(o);
}

class Trial {
 public:
  Trial(const Context &ctx, enum op op, size_t bytes) : ctx_(ctx), op_(op), x_(bytes / sizeof(float)) {
    int n = ctx->size;
    for (size_t i = 0; i < x_.size(); i++) x_[i] = sample_of(ctx->rank, i);
    for (int r = 0; r < n; r++) lengths_.push_back(part_start(x_.size(), n, r + 1) - part_start(x_.size(), n, r));
    if (op == ALLGATHER) y_.resize(x_.size());
    if (op == ALLTOALL) y_.resize(own() * n);
  }

  void run() {
    switch (op_) {
      case ALLREDUCE: allreduce(ctx_, x_, x_.size(), &gloo::sum<float>); break;
      case BROADCAST: broadcast(ctx_, x_.data(), x_.size()); break;
      case ALLGATHER: {
        gloo::AllgathervOptions o(ctx_);
        o.setInput(x_.data() + start(ctx_->rank), own());
        o.setOutput(y_.data(), lengths_);
        gloo::allgatherv(o);
        break;
      }
      case ALLTOALL: {
        gloo::AlltoallvOptions o(ctx_);
        o.setInput(x_.data(), std::vector<int64_t>(lengths_.begin(), lengths_.end()));
        o.setOutput(y_.data(), std::vector<int64_t>(ctx_->size, (int64_t)own()));
        gloo::alltoallv(o);
        break;
      }
      default: barrier(ctx_);
    }
  }

  // Runs once on numbers whose result is known, and zeroes them.
  bool verify() {
    int n = ctx_->size;
    bool good = true;
    run();
    switch (op_) {
      case ALLREDUCE: good = check(x_.data(), x_.size(), 0, n, -1); break;
      case BROADCAST: good = check(x_.data(), x_.size(), 0, n, 0); break;
      case ALLGATHER:
        for (int r = 0; r < n; r++) good &= check(y_.data() + start(r), lengths_[r], start(r), n, r);
        break;
      case ALLTOALL:
        for (int r = 0; r < n; r++) good &= check(y_.data() + own() * r, own(), start(ctx_->rank), n, r);
        break;
      default: break;
    }
    std::fill(x_.begin(), x_.end(), 0.0f);
    return good;
  }

 private:
  size_t own() const { return lengths_[ctx_->rank]; }
  size_t start(int rank) const { return part_start(x_.size(), ctx_->size, rank); }

  Context ctx_;
  enum op op_;
  std::vector<float> x_, y_; // the whole tensor, and what is gathered
  std::vector<size_t> lengths_;
};

bool measure(const Context &ctx, const struct plan &p, size_t bytes, std::vector<int64_t> &ns) {
  Trial trial(ctx, p.op, bytes);
  if (!trial.verify()) return false;
  int n = 0;
  for (int batch = 3; n == 0; batch *= 2) {
    int64_t took = now_ns();
    for (int i = 0; i < batch; i++) trial.run();
    took = now_ns() - took;
    broadcast(ctx, &took, 1);
    n = samples_for(p.seconds, took, batch);
  }
  std::fill(ns.begin(), ns.end(), 0);
  barrier(ctx);
  for (int i = 0; i < n; i++) {
    int64_t begun = now_ns();
    trial.run();
    ns[i] = now_ns() - begun;
  }
  allreduce(ctx, ns, (size_t)n, &gloo::max<int64_t>);
  if (ctx->rank == 0) print_line(bytes, ns.data(), n);
  return true;
}

// Older releases of Gloo take a store by reference, newer ones as a shared_ptr.
struct AnyStore {
  std::shared_ptr<gloo::rendezvous::Store> store;
  operator gloo::rendezvous::Store &() const { return *store; }
  operator std::shared_ptr<gloo::rendezvous::Store>() const { return store; }
};

bool rank_main(const struct plan &p, int rank, int n, const std::string &address, const AnyStore &store) {
  gloo::transport::tcp::attr a;
  a.hostname = address;
  auto ctx = std::make_shared<gloo::rendezvous::Context>(rank, n);
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(a);
  ctx->connectFullMesh(store, device);
  std::vector<int64_t> ns(MAX_SAMPLES);
  for (int s = 0; s < p.nsizes; s++) {
    if (!measure(ctx, p, p.sizes[s], ns)) return false;
  }
  barrier(ctx); // nobody closes a connection that another still needs
  return true;
}

// Runs body and exits with its result, even if other threads still run.
template <typename Body>
[[noreturn]] void leave(int rank, Body body) {
  bool good = false;
  try {
    good = body();
  } catch (const std::exception &e) {
    fprintf(stderr, "rank %d: %s\n", rank, e.what());
  }
  fflush(stdout);
  _exit(good ? 0 : 1);
}

} // namespace

int main(int argc, char **argv) {
  struct plan p = {};
  if ((argc != 4 && argc != 6) || !read_plan(&p, argv + 1)) return 2;
  if (p.op == REDUCESCATTER) return fprintf(stderr, "Gloo has no reducescatter of its own\n"), 2;
  if (argc == 4) {
    const char *text = getenv("RANK");
    int rank = text ? atoi(text) : 0;
    leave(rank, [&] {
      auto store = std::make_shared<NetStore>(rank);
      return rank_main(p, rank, atoi(variable("WORLD_SIZE").c_str()), store->address(), {store});
    });
  }
  int n = atoi(argv[4]);
  pid_t parent = getpid();
  std::vector<pid_t> ranks;
  for (int r = 0; r < n; r++) {
    pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      leave(r, [&] {
        return rank_main(p, r, n, "127.0.0.1", {std::make_shared<gloo::rendezvous::FileStore>(argv[5])});
      });
    }
    if (pid < 0) return perror("fork"), 1;
    ranks.push_back(pid);
  }
  int bad = 0;
  int status;
  for (pid_t pid; (pid = wait(&status)) > 0;) {
    ranks.erase(std::find(ranks.begin(), ranks.end(), pid));
    if (status == 0) continue;
    bad = 1;
    for (pid_t r : ranks) kill(r, SIGKILL); // they would wait for the one that failed
  }
  return bad;
}
