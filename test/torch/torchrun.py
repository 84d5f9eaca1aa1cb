#!/usr/bin/python3
"""PyTorch's own launcher on Debian 12, whose Python 3.11 iterates over flags of enum differently.

There torch 1.13 fails to parse the value 0 of --redirects and --tee; this launcher parses them by number.
"""
from torch.distributed.elastic.multiprocessing import api


def read(cls, text):
    if ":" in text:
        return {int(rank): cls(int(std)) for rank, std in (part.split(":") for part in text.split(","))}
    return cls(int(text))


if __name__ == "__main__":
    api.Std.from_str = classmethod(read)
    from torch.distributed.run import main
    main()
