#!/usr/bin/python3
"""A discovery plugin in Python for the machines in a JSON file. It does the same as the one in Go (../discovery-plugin), with the same
settings:

    apt-get install python3-grpcio python3-protobuf python3-cryptography
    echo '[{"name": "localhost", "gpus": 2, "state": "up"}]' > machines.json

    hvdrun discover --discovery-plugin ./inventory.py --discovery-config inventory=machines.json
    hvdrun discover --discovery-plugin ./inventory.py --discovery-config inventory=machines.json --verify
    hvdrun -np 2 --min-np 1 --discovery-plugin ./inventory.py --discovery-config inventory=machines.json -- ./train

hvdrun starts it, reads one line from its stdout, and then calls it by gRPC. This file is the part of this plugin: settings, the list,
and its changes. discovery_plugin.py is the common part of plugins in Python (the handshake, TLS, the services), which can be used
unchanged. discovery_pb2.py has the messages, generated from internal/wire/discovery.proto by protoc --python_out. Other languages
need the same three parts; the head of that file specifies them.
"""

import json

import discovery_pb2
import discovery_plugin


class Inventory(discovery_plugin.Source):
    """Discovers the machines in the file that are up or leaving."""

    def configure(self, settings):
        """Receives the settings of --discovery-config. hvdrun calls it before the other methods."""
        unknown = sorted(settings.keys() - {"inventory", "every"})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a setting: the settings are inventory and every")
        if "inventory" not in settings:
            raise ValueError("inventory is missing: the path of a JSON file")
        self.path = settings["inventory"]
        self.every = float(settings.get("every", 0.2))

    def discover(self):
        """Returns the complete list or raises. A partial list would stop the workers on the missing hosts."""
        with open(self.path, encoding="utf-8") as file:
            machines = json.load(file)
        hosts = []  # in the order of the file, so that the order is the same in every call
        for machine in machines:
            if machine["state"] not in ("up", "leaving", "down"):
                raise ValueError(f"{self.path}: machine {machine['name']!r} is in state {machine['state']!r}")
            if machine["state"] != "down":
                hosts.append(discovery_pb2.Host(
                    name=machine["name"], slots=machine["gpus"], draining=machine["state"] == "leaving"))
        return hosts

    def watch(self, ended):
        """Optional. It reports changes at once instead of at hvdrun's next poll."""
        last = None
        while not ended.is_set():
            hosts = self.discover()  # if this fails, hvdrun keeps the last list and watches again
            if hosts != last:
                last = hosts
                yield hosts
            ended.wait(self.every)


if __name__ == "__main__":
    discovery_plugin.serve(Inventory())
