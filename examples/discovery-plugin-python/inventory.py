#!/usr/bin/python3
"""A discovery plugin in Python: the machines that a team lists in a JSON file.

hvdrun starts it, reads one line from its stdout, and then asks it by gRPC. What all such plugins need stands in
discovery_plugin.py; this is what only this one knows.
"""

import json

import discovery_pb2
import discovery_plugin


class Inventory(discovery_plugin.Source):
    """Finds the machines of the file that are up or leaving."""

    def configure(self, settings):
        """Takes what stands in --discovery-config, before anything else is called."""
        unknown = sorted(settings.keys() - {"inventory", "every"})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no setting: known are inventory and every")
        if "inventory" not in settings:
            raise ValueError("inventory is missing: the path of a JSON file")
        self.path = settings["inventory"]
        self.every = float(settings.get("every", 0.2))

    def discover(self):
        """Returns the whole list, or raises: never a part of it, since hosts that are missing lose their workers."""
        with open(self.path, encoding="utf-8") as file:
            machines = json.load(file)
        hosts = []  # in the order of the file: the same in every call
        for machine in machines:
            if machine["state"] not in ("up", "leaving", "down"):
                raise ValueError(f"{self.path}: machine {machine['name']!r} is in state {machine['state']!r}")
            if machine["state"] != "down":
                hosts.append(discovery_pb2.Host(
                    name=machine["name"], slots=machine["gpus"], draining=machine["state"] == "leaving"))
        return hosts

    def watch(self, ended):
        """Optional. With it, a change reaches the job at once, rather than when hvdrun asks again."""
        last = None
        while not ended.is_set():
            hosts = self.discover()  # where this fails, hvdrun keeps the last list and watches again
            if hosts != last:
                last = hosts
                yield hosts
            ended.wait(self.every)


if __name__ == "__main__":
    discovery_plugin.serve(Inventory())
