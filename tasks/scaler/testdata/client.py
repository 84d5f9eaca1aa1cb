"""A client of Scaler 1.7.14 for tests: client.py ADDRESS, then one command a line on standard input,
one JSON value a line on standard output. Its serializer writes JSON, and functions by their names."""

import json
import pickle
import sys

import zmq

# Of pyzmq 24, Context.shadow wants an address. Scaler gives it a context.
shadow = zmq.Context.shadow.__func__
zmq.Context.shadow = classmethod(lambda cls, c: shadow(cls, c.underlying if isinstance(c, zmq.Context) else c))

from scaler import Client  # noqa: E402
from scaler.client.serializer.mixins import Serializer  # noqa: E402


class JSONSerializer(Serializer):
    @staticmethod
    def serialize(obj):
        return json.dumps(obj.__name__ if callable(obj) else obj).encode()

    @staticmethod
    def deserialize(payload):
        return json.loads(payload)


def named(name, parameters=1):
    """A function that is only a name."""
    scope = {}
    exec(f"def {name}({', '.join('abc'[:parameters])}): ...", scope)
    return scope[name]


def outcome(future):
    try:
        return {"result": future.result()}
    except BaseException as e:
        return {"error": type(e).__name__, "text": str(e)}


def main():
    client = Client(address=sys.argv[1], serializer=JSONSerializer(), heartbeat_interval_seconds=1)
    pending = []
    for line in sys.stdin:
        command, *args = json.loads(line)
        answer = None
        if command == "call":  # function, arguments of one call
            answer = outcome(client.submit(named(args[0], len(args[1])), *args[1]))
        elif command == "submit":  # function, one argument for each call
            function = named(args[0])
            pending += [client.submit(function, a) for a in args[1]]
        elif command == "cancel":
            answer = pending.pop(args[0]).cancel()
        elif command == "gather":
            answer = [outcome(f) for f in pending]
            pending.clear()
        elif command == "pickled":
            with Client(address=sys.argv[1]) as other:
                answer = outcome(other.submit(pickle.dumps, 1))
        elif command == "disconnect":
            client.disconnect()
        elif command == "shutdown":
            client.shutdown()
        print(json.dumps(answer), flush=True)


main()
