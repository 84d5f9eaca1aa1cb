"""Tests how the ranks of a host agree by shared memory. A rank is a thread here, which opens the others' pages like a process."""
import os
import sys
import threading
import unittest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hvdrun._agree import Pages  # noqa: E402


def together(pages, play):
    """Returns for each rank the result of play(rank, the rank's pages)."""
    answers = [None] * len(pages)

    def run(rank):
        answers[rank] = play(rank, pages[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(pages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class TestPages(unittest.TestCase):
    def setUp(self):
        self.pages = [Pages(60) for _ in range(4)]
        self.addresses = [p.address() for p in self.pages]

    def open(self, generation, ranks=4):
        for page in self.pages[:ranks]:
            self.assertTrue(page.open(generation, self.addresses[:ranks]))

    def test_all_have_the_flags_of_all(self):
        self.open(1)

        def play(rank, page):
            return [page.agree(1 << rank if turn % 4 == rank else 0) for turn in range(500)]

        self.assertEqual(together(self.pages, play), [[1 << turn % 4 for turn in range(500)]] * 4)

    def test_an_agreement_waits_for_the_last_rank(self):
        self.open(1)
        came = []

        def late(rank, page):
            if rank == 3:
                came.append("late")
            return page.agree(0), list(came)

        self.assertEqual(together(self.pages, late), [(0, ["late"])] * 4)

    def test_a_rank_that_gives_up_ends_the_waits_of_all(self):
        self.open(1)

        def play(rank, page):
            if rank == 2:
                page.cut()
                return None
            return page.agree(0)

        self.assertEqual(together(self.pages, play), [None] * 4)

    def test_a_later_world_does_not_see_what_an_earlier_one_left(self):
        self.open(1)
        together(self.pages, lambda rank, page: page.agree(255))
        self.pages[3].cut()  # it has died
        self.open(2, ranks=3)
        self.assertEqual(together(self.pages[:3], lambda rank, page: [page.agree(0), page.agree(rank)]), [[0, 3]] * 3)

    def test_the_same_world_goes_on_counting(self):
        self.open(1)
        together(self.pages, lambda rank, page: page.agree(1))
        self.open(1)
        self.assertEqual(together(self.pages, lambda rank, page: page.agree(rank * 2)), [6] * 4)

    def test_a_wait_has_an_end(self):
        short = Pages(0)
        self.assertTrue(short.open(1, [short.address(), self.addresses[0]]))
        self.assertIsNone(short.agree(0))

    def test_a_page_that_is_not_there_is_not_found(self):
        pid, fd, token = self.addresses[0]
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        for address in (pid, fd, token + 1), (pid, read, token), (pid, 1 << 20, token), (0, 0, 0):
            self.assertFalse(self.pages[1].open(1, [address, self.addresses[1]]), address)

    def test_more_ranks_than_pages_are_mapped_for(self):
        self.assertFalse(self.pages[0].open(1, self.addresses * 20))


if __name__ == "__main__":
    unittest.main()
