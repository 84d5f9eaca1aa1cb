"""Compares the backend hvdrun with gloo and with a single process. It needs torch, and HVD_LIBRARY."""
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from hvdrun import _backend  # noqa: E402
from hvdrun import _library as lib  # noqa: E402

_backend.register()
torch.set_num_threads(1)


def ranks(size, body, killed=()):
    """Runs body(rank, store) in size processes with a common store. All ranks except those in killed must exit with 0."""
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.flush()
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    faulthandler.enable()
                    body(rank, dist.FileStore(os.path.join(folder, "store"), -1))
                    if dist.is_initialized():
                        dist.destroy_process_group()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    lib._leave()
                    os._exit(status)
            children.append(pid)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    wrong = {rank: end for rank, end in enumerate(ends) if end != 0 and rank not in killed}
    if wrong:
        raise AssertionError(f"ranks have ended with {wrong}")


def begin(rank, size, store, **more):
    dist.init_process_group("hvdrun", store=store, rank=rank, world_size=size, **more)
    return dist.group.WORLD


def values(rank, dtype, count=12):
    """Returns small whole numbers, whose sums and products are exact in every type."""
    if dtype == torch.bool:
        return torch.arange(count) % (rank + 2) == 0
    t = (torch.arange(count) * 7 + rank * 3) % 5 + (rank + 1) % 3
    return t.to(dtype)


def when_waiting(action, *arguments):
    """Calls action in another thread once the main thread waits for other ranks."""
    main = threading.main_thread().ident

    def watch():
        for _ in range(2):  # at first it can still be on its way into the call
            while sys._current_frames()[main].f_code.co_name not in ("run", "wait"):
                time.sleep(0.001)
            time.sleep(0.01)
        action(*arguments)

    threading.Thread(target=watch, daemon=True).start()


class Operations(unittest.TestCase):
    DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8]

    def test_like_gloo(self):
        for size in (2, 3):
            ranks(size, lambda rank, store: self.like_gloo(rank, size, store))

    def like_gloo(self, rank, size, store):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        gloo, ours = dist.group.WORLD, dist.new_group(backend="hvdrun")
        compared = set()
        for dtype in self.DTYPES:
            for name, operation in self.operations(rank, size, dtype):
                try:
                    want = operation(gloo)
                except (RuntimeError, NotImplementedError, ValueError, TypeError):
                    operation(ours)  # must succeed although gloo has failed
                    continue
                got = operation(ours)
                self.assertEqual([(t.dtype, t.tolist()) for t in got], [(t.dtype, t.tolist()) for t in want], f"{name} of {dtype}")
                compared.add(name)
        if rank == 0:
            print(f"{size} ranks, as gloo: {sorted(compared)}")
        assert len(compared) >= 14, compared

    def operations(self, rank, size, dtype):
        x = values(rank, dtype)
        if dtype == self.DTYPES[0]:  # later, gloo's barrier can raise the error of an earlier operation, on one rank alone
            def barrier(group):
                dist.barrier(group=group)
                return []
            yield "barrier", barrier

        def reduces(op):
            def run(group):
                t = x.clone()
                dist.all_reduce(t, op, group=group)
                return [t]
            return run

        for name in ("SUM", "MIN", "MAX", "PRODUCT"):
            yield name, reduces(getattr(dist.ReduceOp, name))
        if not dtype.is_floating_point:
            for name in ("BAND", "BOR", "BXOR"):
                yield name, reduces(getattr(dist.ReduceOp, name))

        def broadcast(group):
            t = x.clone()
            dist.broadcast(t, src=size - 1, group=group)
            return [t]
        yield "broadcast", broadcast

        def reduce(group):
            t = x.clone()
            dist.reduce(t, dst=1, group=group)
            return [t] if rank == 1 else []
        yield "reduce", reduce

        def all_gather(group):
            out = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(out, x, group=group)
            return out
        yield "all_gather", all_gather

        def all_gather_into(group):
            out = x.new_empty(size * x.numel())
            dist.all_gather_into_tensor(out, x, group=group)
            return [out]
        if hasattr(dist, "all_gather_into_tensor"):
            yield "all_gather_into_tensor", all_gather_into

        def gather(group):
            out = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
            dist.gather(x, out, dst=0, group=group)
            return out or []
        yield "gather", gather

        def scatter(group):
            out = torch.empty_like(x)
            dist.scatter(out, [values(r + 10, dtype) for r in range(size)] if rank == 1 else None, src=1, group=group)
            return [out]
        yield "scatter", scatter

        def reduce_scatter(group):
            out = torch.empty_like(x)
            dist.reduce_scatter(out, [values(rank + r, dtype) for r in range(size)], group=group)
            return [out]
        yield "reduce_scatter", reduce_scatter

        def reduce_scatter_tensor(group):
            out = torch.empty_like(x)
            dist.reduce_scatter_tensor(out, torch.cat([values(rank + r, dtype) for r in range(size)]), group=group)
            return [out]
        if hasattr(dist, "reduce_scatter_tensor"):
            yield "reduce_scatter_tensor", reduce_scatter_tensor

        def all_to_all_single(group):
            t = values(rank, dtype, 2 * size)
            out = torch.empty_like(t)
            dist.all_to_all_single(out, t, group=group)
            return [out]
        yield "all_to_all_single", all_to_all_single

        def all_to_all_uneven(group):
            t = values(rank, dtype, 3 * size * (size + 1) // 2).reshape(-1, 3)
            out = x.new_empty((rank + 1) * size, 3)
            dist.all_to_all_single(out, t, [rank + 1] * size, [r + 1 for r in range(size)], group=group)
            return [out]
        yield "all_to_all_single of uneven parts", all_to_all_uneven

        def all_to_all(group):
            out = [x.new_empty(2, 3) for _ in range(size)]
            dist.all_to_all(out, [values(rank + r, dtype, 6).reshape(2, 3) for r in range(size)], group=group)
            return out
        yield "all_to_all", all_to_all

    def test_semantics(self):
        """Every reduction has the results in the table of docs/collectives.md, at any position, in any size and on any rank."""
        for size in (2, 3):
            ranks(size, lambda rank, store: self.semantics(rank, size, store))

    @staticmethod
    def rows(dtype, size):
        """Yields the operation, the value of one rank, the value of the others, and the result."""
        if dtype == torch.bool:
            for op in ("SUM", "MAX"):
                yield from ((op, True, False, True), (op, True, True, True), (op, False, False, False))
            for op in ("PRODUCT", "MIN"):
                yield from ((op, False, True, False), (op, True, True, True), (op, False, False, False))
            return
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        if dtype.is_floating_point:
            inf, nan, tiny = float("inf"), float("nan"), info.smallest_normal * info.eps
            for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
                yield from ((op, nan, 1.0, nan), (op, nan, inf, nan))
            large = 49152.0 if dtype == torch.float16 else info.max
            yield from (("MAX", inf, -inf, inf), ("MIN", -inf, inf, -inf), ("MAX", 0.0, -0.0, 0.0), ("MIN", -0.0, 0.0, -0.0),
                        ("SUM", -0.0, -0.0, -0.0), ("AVG", -0.0, -0.0, -0.0), ("PRODUCT", -0.0, 1.0, -0.0), ("SUM", inf, -inf, nan),
                        ("SUM", large, large, inf), ("PRODUCT", large, large, inf), ("SUM", tiny, 0.0, tiny), ("PRODUCT", tiny, 1.0, tiny),
                        ("AVG", large, large, large if dtype == torch.float16 else inf))
            return

        def wrapped(n):
            return (n - info.min) % (1 << info.bits) + info.min
        total = wrapped(size * info.max)
        yield from (("MAX", info.max, info.min, info.max), ("MIN", info.min, info.max, info.min), ("SUM", info.max, info.max, total),
                    ("PRODUCT", info.max, info.max, wrapped(info.max ** size)), ("AVG", info.max, info.max, int(abs(total) // size) * (-1 if total < 0 else 1)))
        if info.min < 0:
            yield from (("AVG", -3, 0, -(3 // size)), ("AVG", info.min, 0, -(-info.min // size)))

    def semantics(self, rank, size, store):
        begin(rank, size, store)
        for dtype in (*self.DTYPES, torch.int16, torch.bool):
            for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
                rows = [r for r in self.rows(dtype, size) if r[0] == op]
                if not rows:
                    continue
                for count in (0, 1, 40, 5001):
                    special = [i // len(rows) % size == rank for i in range(count)]
                    x = torch.tensor([rows[i % len(rows)][1 if special[i] else 2] for i in range(count)], dtype=dtype)
                    want = torch.tensor([rows[i % len(rows)][3] for i in range(count)], dtype=dtype)
                    number = getattr(dist.ReduceOp, op)
                    all_reduced, reduced, part = x.clone(), x.clone(), torch.empty_like(x)
                    dist.all_reduce(all_reduced, number)
                    dist.reduce(reduced, dst=1, op=number)
                    dist.reduce_scatter(part, [x.clone() for _ in range(size)], number)
                    handles = [(t, dist.all_reduce(t, number, async_op=True)) for t in (x.clone(), x.clone())]
                    for _, h in handles:
                        h.wait()
                    for what, got in (("all_reduce", all_reduced), ("reduce", reduced if rank == 1 else want), ("reduce_scatter", part),
                                      *(("asynchronous", t) for t, _ in handles)):
                        same = (got == want) & (torch.signbit(got) == torch.signbit(want)) if dtype != torch.bool else got == want
                        if dtype.is_floating_point:
                            same |= got.isnan() & want.isnan()
                        bad = (~same).nonzero().flatten().tolist()
                        assert not bad, (what, dtype, op, count, rows[bad[0] % len(rows)], got[bad[0]])
        t = torch.tensor([True, False])
        with self.assertRaisesRegex(lib.Error, "logical values have no average"):
            dist.all_reduce(t, dist.ReduceOp.AVG)
        assert t.tolist() == [True, False], t
        if hasattr(torch, "float8_e4m3fn"):
            with self.assertRaisesRegex(lib.Error, "has no such reduction of torch.float8_e4m3fn"):
                dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn))

    def test_forms(self):
        """Tensors can be not contiguous, without elements or dimensions, complex or logical. Objects work too."""
        def body(rank, store):
            begin(rank, 2, store)
            t = torch.arange(12.0).reshape(3, 4).t() + rank
            dist.all_reduce(t)
            self.assertEqual(t.tolist(), (2 * torch.arange(12.0).reshape(3, 4).t() + 1).tolist())
            t = torch.arange(20.0)[::3] * (1 - rank)
            dist.broadcast(t, 0)
            self.assertEqual(t.tolist(), torch.arange(20.0)[::3].tolist())
            for t in (torch.empty(0), torch.tensor(float(rank))):
                dist.all_reduce(t)
                self.assertEqual(t.tolist(), (torch.ones_like(t)).tolist())
            t = torch.tensor([1 + 2j, 3j]) * (rank + 1)
            dist.all_reduce(t)
            self.assertEqual(t.tolist(), [3 + 6j, 9j])
            t = torch.tensor([True, False, rank == 0, rank == 1])
            dist.all_reduce(t)
            self.assertEqual(t.tolist(), [True, False, True, True])
            objects = [None, None]
            dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
            self.assertEqual([o["rank"] for o in objects], [0, 1])
            objects = [{"from": rank}]
            dist.broadcast_object_list(objects, src=1)
            self.assertEqual(objects, [{"from": 1}])
            t = torch.ones(3) + rank
            dist.all_reduce(t, dist.ReduceOp.AVG)
            self.assertEqual(t.tolist(), [1.5] * 3)
            with self.assertRaisesRegex(RuntimeError, "dense tensors"):
                dist.all_reduce(torch.eye(2).to_sparse())
            dist.barrier()
        ranks(2, body)

    def test_messages(self):
        """Messages of any size arrive in order, also during collectives and in batches."""
        def body(rank, store):
            begin(rank, 3, store)
            right, left = (rank + 1) % 3, (rank - 1) % 3
            dist.send(torch.full((5,), float(rank)), right)  # a small message does not wait for its receiver
            got = torch.empty(5)
            dist.recv(got, left)
            self.assertEqual(got.tolist(), [left] * 5)
            sent, got = torch.full((3, 100000), rank, dtype=torch.int64), torch.empty(100000, 3, dtype=torch.int64).t()
            works = [dist.isend(sent, right), dist.irecv(got, left)]
            dist.barrier()
            for work in works:
                work.wait()
            self.assertTrue((got == left).all())
            numbers = torch.arange(20) * (rank + 1)
            got = torch.empty_like(numbers)
            batch = []
            for i in range(20):
                batch += [dist.P2POp(dist.irecv, got[i:i + 1], left), dist.P2POp(dist.isend, numbers[i:i + 1], right)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            self.assertEqual(got.tolist(), (torch.arange(20) * (left + 1)).tolist())
            with self.assertRaisesRegex(RuntimeError, "give recv a src"):
                dist.recv(got)
        ranks(3, body)

    def test_new_group(self):
        def body(rank, store):
            begin(rank, 3, store)
            group = dist.new_group([0, 2])
            if rank != 1:
                t = torch.tensor([rank + 1.0])
                dist.all_reduce(t, group=group)
                self.assertEqual(t.item(), 4)
            dist.barrier()
        ranks(3, body)


class Asynchronous(unittest.TestCase):
    def test_order(self):
        """Works complete in the order in which they were started, in whatever order the program waits for them."""
        def body(rank, store):
            begin(rank, 2, store)
            tensors = [torch.full((1 + 997 * i % 5000,), float(i + rank)) for i in range(200)]
            works = [dist.all_reduce(t, async_op=True) for t in tensors[:199]]
            dist.all_reduce(tensors[199])  # waits for the works before it
            self.assertTrue(all(w.is_completed() for w in works))
            for w in reversed(works):
                w.wait()
            for i, t in enumerate(tensors):
                self.assertTrue((t == 2 * i + 1).all(), i)
        ranks(2, body)

    def test_dropped(self):
        """The memory of a tensor is kept during its collective, even if the program has dropped the tensor."""
        def body(rank, store):
            begin(rank, 2, store)
            for _ in range(50):
                dist.all_reduce(torch.ones(100000), async_op=True)
                torch.empty(100000).fill_(float("nan"))
            t = torch.ones(10)
            dist.all_reduce(t)
            self.assertEqual(t.tolist(), [2.0] * 10)
            self.assertLessEqual(sum(map(len, dist.group.WORLD._kept.values())), 65)
        ranks(2, body)

    def test_futures(self):
        def body(rank, store):
            begin(rank, 2, store)
            t = torch.tensor([1.0 + rank])
            halved = dist.all_reduce(t, async_op=True).get_future().then(lambda f: f.value()[0] / 2)
            self.assertEqual(halved.wait().item(), 1.5)
        ranks(2, body)


class Ends(unittest.TestCase):
    def test_death(self):
        """A death ends every kind of wait of the other ranks."""
        def body(rank, store):
            begin(rank, 4, store)
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with self.assertRaisesRegex(lib.Aborted, "rank 1"):
                if rank == 0:
                    dist.all_reduce(torch.ones(1000))
                elif rank == 2:
                    dist.all_reduce(torch.ones(1000), async_op=True).wait()
                else:
                    work = dist.all_reduce(torch.ones(1000), async_op=True)
                    with self.assertRaisesRegex(RuntimeError, "rank 1"):
                        work.get_future().wait()
                    work.wait()
            with self.assertRaises(lib.Aborted):
                dist.barrier()
        ranks(4, body, killed={1})

    def test_abort(self):
        """An abort by another thread ends the collective on all ranks."""
        def body(rank, store):
            group = begin(rank, 2, store)
            dist.barrier()
            if rank == 0:
                when_waiting(group.abort)
            else:
                store.get("aborted")
            with self.assertRaises(lib.Aborted):
                dist.barrier()
            store.set("aborted", "1")
        ranks(2, body)

    def test_timeout(self):
        def body(rank, store):
            begin(rank, 2, store, timeout=timedelta(seconds=0.3) if rank == 0 else timedelta(minutes=5))
            if rank == 0:
                with self.assertRaisesRegex(lib.Error, "the call took longer than 300ms"):
                    dist.barrier()
                store.set("late", "1")
            else:
                store.get("late")
                with self.assertRaises(lib.Aborted):
                    dist.barrier()
        ranks(2, body)

    def test_mismatch(self):
        def body(rank, store):
            begin(rank, 2, store)
            with self.assertRaisesRegex(lib.Error, "do not match"):
                dist.all_reduce(torch.ones(2 + rank))
        ranks(2, body)


class Signals(unittest.TestCase):
    def test_interrupt(self):
        """Ctrl-C ends a collective that waits for the other ranks."""
        for asynchronous in (False, True):
            def body(rank, store):
                begin(rank, 2, store)
                if rank == 1:
                    store.get("interrupted")
                    return
                when_waiting(os.kill, os.getpid(), signal.SIGINT)
                with self.assertRaises(KeyboardInterrupt):
                    if asynchronous:
                        dist.all_reduce(torch.ones(4), async_op=True).wait()
                    else:
                        dist.all_reduce(torch.ones(4))
                store.set("interrupted", "1")
            ranks(2, body)

    def test_handler(self):
        """The handler of a signal runs while a collective waits. The collective continues."""
        def body(rank, store):
            begin(rank, 2, store)
            if rank == 0:
                signal.signal(signal.SIGTERM, lambda *_: store.set("handled", "1"))
                when_waiting(os.kill, os.getpid(), signal.SIGTERM)
            else:
                store.get("handled")
            t = torch.ones(4)
            dist.all_reduce(t)
            self.assertEqual(t.tolist(), [2.0] * 4)
        ranks(2, body)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((3,), float(i))


class Forks(unittest.TestCase):
    def test_loader(self):
        """A DataLoader can start and end worker processes during collectives."""
        def body(rank, store):
            begin(rank, 2, store)
            for _ in range(2):
                total = torch.zeros(3)
                loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
                for batch in loader:
                    work = dist.all_reduce(batch, async_op=True)
                    work.wait()
                    total += batch.sum(0)
                self.assertEqual(total.tolist(), [2 * 63 * 32.0] * 3)
        ranks(2, body)

    def test_child(self):
        """In a forked child, a collective raises an error instead of blocking, and the parent's group still works."""
        def body(rank, store):
            group = begin(rank, 2, store)
            work = dist.all_reduce(torch.ones(2), async_op=True)
            work.wait()
            pid = os.fork()
            if pid == 0:
                right = False
                try:
                    dist.all_reduce(torch.ones(2))
                except lib.Error as err:
                    right = "process forked from" in str(err)
                try:
                    lib.load()
                    right = False
                except lib.Error:
                    pass
                del group, work
                os._exit(0 if right else 1)
            self.assertEqual(os.waitpid(pid, 0)[1], 0)
            dist.barrier()
        ranks(2, body)


class Training(unittest.TestCase):
    @staticmethod
    def net():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def test_ddp(self):
        """Training has the result of a single process with the whole batch."""
        def body(rank, store, size):
            begin(rank, size, store)
            net = nn.parallel.DistributedDataParallel(self.net(), bucket_cap_mb=0.01)
            alone = self.net()
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, alone)]
            torch.manual_seed(1)
            for _ in range(20):
                x, y = torch.randn(12, 64), torch.randn(12, 10)
                part = 12 // size
                for model, optimizer, rows in ((net, optimizers[0], slice(rank * part, rank * part + part)), (alone, optimizers[1], slice(0, 12))):
                    optimizer.zero_grad()
                    ((model(x[rows]) - y[rows]) ** 2).mean().backward()
                    optimizer.step()
            for a, b in zip(net.parameters(), alone.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        for size in (1, 2, 4):
            ranks(size, lambda rank, store: body(rank, store, size))

    def test_ddp_death(self):
        """After a death, the backward pass raises an error."""
        def body(rank, store):
            begin(rank, 3, store)
            net = nn.parallel.DistributedDataParallel(self.net(), bucket_cap_mb=0.01)
            with self.assertRaisesRegex(RuntimeError, "hvdrun: .*rank 2"):
                for step in range(10):
                    if (rank, step) == (2, 5):
                        os.kill(os.getpid(), signal.SIGKILL)
                    net(torch.randn(4, 64)).sum().backward()
        ranks(3, body, killed={2})

    def test_same_bits(self):
        """Sums of numbered microbatches are the same to the bit for every number of ranks."""
        with tempfile.TemporaryDirectory() as folder:
            def body(rank, store, size, leaves):
                group = begin(rank, size, store)
                firsts = [leaves * r // size for r in range(size)] + [leaves]
                mine = _backend.Leaves(firsts[rank], leaves)
                for leaf in range(firsts[rank], firsts[rank + 1]):
                    torch.manual_seed(leaf)
                    mine.add(torch.randn(1000) * 10 ** (leaf % 5))
                total = torch.empty(1000)
                group.reduce_tree(total, mine.nodes, firsts)
                torch.save(total, os.path.join(folder, f"{leaves} {size} {rank}"))
            for leaves in (1, 4, 7, 13):
                for size in (1, 2, 3, 4):
                    ranks(size, lambda rank, store: body(rank, store, size, leaves))
                results = [torch.load(os.path.join(folder, f"{leaves} {size} {rank}")) for size in (1, 2, 3, 4) for rank in range(size)]
                for r in results[1:]:
                    self.assertTrue(torch.equal(results[0].view(torch.int32), r.view(torch.int32)), leaves)


if __name__ == "__main__":
    unittest.main(verbosity=2)
