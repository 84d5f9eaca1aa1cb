"""The common part of hvdrun's discovery plugins in Python.

It needs Debian's python3-grpcio, python3-protobuf and python3-cryptography, and discovery_pb2.py, which protoc generates
from hvdrun's internal/wire/discovery.proto. The head of that file specifies the requirements of a plugin.
"""

import base64
import concurrent.futures
import datetime
import os
import signal
import sys
import threading

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import discovery_pb2

VERSION = 1  # of discovery.proto
SERVING = b"\x08\x01"  # an encoded grpc.health.v1.HealthCheckResponse
CALLS = 32  # maximum of concurrent calls; each Watch uses a thread


class Source:
    """The base class of a plugin's source. hvdrun logs the text of its exceptions."""

    def configure(self, settings):
        """Receives the settings, a dict of strings, or raises ValueError."""
        if settings:
            raise ValueError(f"this plugin has no settings, but is given {sorted(settings)[0]!r}")

    def discover(self):
        """Returns a list of discovery_pb2.Host, or raises. Several threads may call it at once."""
        raise NotImplementedError

    watch = None  # or a method that yields the complete list at once and after each change, until the given event is set


def serve(source):
    """Runs the plugin until hvdrun ends it. It must be called from the main thread."""
    if os.environ.get("HVD_PLUGIN_COOKIE") != "hvdrun-discovery":
        sys.exit("This is a discovery plugin of hvdrun: hvdrun --discovery-plugin " + sys.argv[0])
    if str(VERSION) not in os.environ.get("PLUGIN_PROTOCOL_VERSIONS", "").split(","):
        # hvdrun reports both versions when it reads this one's.
        print("this plugin speaks another version of the discovery protocol", file=sys.stderr)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    key, certificate = make_certificate()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(CALLS))
    server.add_generic_rpc_handlers((handlers(source, ended),))
    credentials = grpc.ssl_server_credentials(
        [(key, certificate.public_bytes(serialization.Encoding.PEM))],
        root_certificates=os.environ["PLUGIN_CLIENT_CERT"].encode(), require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()

    der = certificate.public_bytes(serialization.Encoding.DER)
    text = base64.b64encode(der).decode().rstrip("=")
    print(f"1|{VERSION}|tcp|127.0.0.1:{port}|grpc|{text}", flush=True)
    sys.stdout = sys.stderr  # stdout must contain nothing else
    ended.wait()
    server.stop(grace=None).wait()
    os._exit(0)  # does not wait for threads of the source


def make_certificate():
    """Returns a new key and certificate of this process. hvdrun gets the certificate in the handshake."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.utcnow()
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256()))
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, certificate


def handlers(source, ended):
    """Returns the services: hvdrun.v1.Discovery, grpc.health.v1.Health, by which hvdrun checks the plugin, and the
    controller that ends it."""

    def configure(request, context):
        try:
            source.configure(dict(request.settings))
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return discovery_pb2.ConfigureReply()

    def discover(_, context):
        try:
            return discovery_pb2.HostList(hosts=source.discover())
        except Exception as error:  # of any kind: a list would be wrong
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {error}")

    def watch(_, context):
        cancelled = threading.Event()
        if not context.add_callback(cancelled.set):
            return
        try:
            for hosts in source.watch(cancelled):
                yield discovery_pb2.HostList(hosts=hosts)
        except Exception as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {error}")

    def shutdown(*_):
        ended.set()
        return b""

    methods = {
        "/hvdrun.v1.Discovery/Configure": unary(configure, discovery_pb2.ConfigureRequest, discovery_pb2.ConfigureReply),
        "/hvdrun.v1.Discovery/Discover": unary(discover, discovery_pb2.DiscoverRequest, discovery_pb2.HostList),
        "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(lambda *_: SERVING),
        "/plugin.GRPCController/Shutdown": grpc.unary_unary_rpc_method_handler(shutdown),
    }
    if source.watch:
        methods["/hvdrun.v1.Discovery/Watch"] = grpc.unary_stream_rpc_method_handler(
            watch, discovery_pb2.WatchRequest.FromString, discovery_pb2.HostList.SerializeToString)

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details):
            return methods.get(details.method)  # None: the call fails as not implemented

    return Handlers()


def unary(function, request, reply):
    return grpc.unary_unary_rpc_method_handler(function, request.FromString, reply.SerializeToString)
