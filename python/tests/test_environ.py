"""Tests the environment of processes that a worker starts. No rank runs."""
import multiprocessing
import os
import sys
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hvdrun import _environ  # noqa: E402


def answer(queue):
    queue.put([os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")])


class TestStarted(unittest.TestCase):
    def test_follows_the_world(self):
        """A child process has the numbers of the newest world, by whatever method it is started."""
        with mock.patch.dict(os.environ):
            for size in 3, 2:
                _environ.tell({"rank": size - 1, "size": size, "local_rank": 0, "local_size": 1})
                for method in multiprocessing.get_all_start_methods():
                    with self.subTest(size=size, method=method):
                        context = multiprocessing.get_context(method)
                        queue = context.SimpleQueue()
                        process = context.Process(target=answer, args=(queue,))
                        process.start()
                        process.join()
                        self.assertEqual(process.exitcode, 0)
                        self.assertEqual(queue.get(), [str(size - 1), str(size), "0"])

    def test_default(self):
        """The same holds for Process and SimpleQueue of the module, which use the default method."""
        with mock.patch.dict(os.environ):
            _environ.tell({"rank": 4, "size": 5})
            queue = multiprocessing.SimpleQueue()
            process = multiprocessing.Process(target=answer, args=(queue,))
            process.start()
            process.join()
            self.assertEqual(queue.get(), ["4", "5", "0"])


if __name__ == "__main__":
    unittest.main()
