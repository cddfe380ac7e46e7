"""A communicator in one process, whose schedules can be enumerated: a model checker for teams.

Each process is a thread, and one of them runs at a time. A process gives way where it looks whether
something is complete without waiting for it (a poll), and where it waits. To start a collective or a message
changes nothing but what polls see. So of processes that go on after a wait any may go first, which
is never tried in another order; a poll may come before all that they do, or after. The schedules
are the choices at polls, which `explore` takes in turn, depth first, by running the program again
with another choice.

Collectives of a communicator are matched by their number, as MPI matches them: the nth of one
process is the nth of all. One that differs in kind, operation, root or size is a mismatch; where
all processes wait and nothing is complete, they would wait for ever.
"""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np

from rankxform.transport.mpi import MpiTeam, PointToPoint

OPERATIONS = {"MAX": np.max, "MIN": np.min, "SUM": np.sum}


class WrongSchedule(AssertionError):
    """What a schedule led to: a mismatch, or a wait without an end."""


class _End(BaseException):
    """Ends the thread of a process whose schedule is over."""


class Request:
    """True until it is complete, as mpi4py's."""

    def __init__(self, world):
        self.world, self.is_complete, self.is_done, self.is_cancelled = world, False, False, False

    def __bool__(self):
        return not self.is_done

    def complete(self):
        self.is_complete = True
        self.world.events += 1

    def Test(self):
        self.is_done = self.is_done or self.is_complete
        return self.is_done

    def Cancel(self):
        if not self.is_complete:
            self.is_cancelled = True
            self.complete()

    def Wait(self, status=None):
        assert self.Test(), "it was cancelled, or had come"
        if status is not None:
            status.is_cancelled = self.is_cancelled


class Status:
    is_cancelled, nbytes = False, 0

    def Is_cancelled(self):
        return self.is_cancelled

    def Get_count(self, datatype):
        return self.nbytes


class World:
    """The processes of one schedule."""

    def __init__(self, size, choices, *, is_eager):
        """is_eager: a broadcast is complete at its root before others take part."""
        self.size, self.is_eager, self.events = size, is_eager, 0
        self.choices, self.options = list(choices), []  # what was chosen, and of how many
        self.collectives, self.messages, self.receives = {}, {}, {}
        self.waits = [None] * size  # what a process waits for; None: it can go on
        self.is_poll = [False] * size  # whether it looks at what others did when it goes on
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.is_back = threading.Semaphore(0)
        self.is_over = False
        self.outcomes = [None] * size
        self.mpi = SimpleNamespace(
            **{name: name for name in OPERATIONS}, BYTE="BYTE", Status=Status,
            Get_processor_name=lambda: "host", COMM_WORLD=None,
        )  # fmt: skip

    def run(self, program):
        """Run a program on all processes; return what came of it on each."""
        threads = [
            threading.Thread(target=self._process, args=(rank, program), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            while unfinished := [r for r in range(self.size) if self.outcomes[r] is None]:
                able = [r for r in unfinished if self.waits[r] is None or self.waits[r]()]
                if not able:
                    raise WrongSchedule(f"processes {unfinished} wait for ever")
                polls = [rank for rank in able if self.is_poll[rank]]
                others = [rank for rank in able if not self.is_poll[rank]]
                able = [*others[:1], *polls]
                rank = able[self._choose(len(able))]
                self.waits[rank] = None
                self.turns[rank].release()
                self.is_back.acquire()
            self._check_left()
        finally:
            self.is_over = True
            for turn in self.turns:
                turn.release()
            for thread in threads:
                thread.join()
        return self.outcomes

    def _choose(self, count):
        position = len(self.options)
        if position == len(self.choices):
            self.choices.append(0)
        self.options.append(count)
        return self.choices[position]

    def _process(self, rank, program):
        self.turns[rank].acquire()
        outcome = ("ended", "the schedule is over")
        try:
            if not self.is_over:
                outcome = ("value", program(ModelTeam(self, rank)))
        except _End:
            pass
        except BaseException as error:
            outcome = ("error", error)
        self.outcomes[rank] = outcome
        self.is_back.release()

    def give_way(self, rank, until=None, *, is_poll=False):
        """Let others run; go on when `until` is true, which it then stays."""
        self.waits[rank], self.is_poll[rank] = until, is_poll
        self.is_back.release()
        self.turns[rank].acquire()
        if self.is_over:
            raise _End

    def _check_left(self):
        queues = (*self.messages.items(), *self.receives.items())
        left = [key for key, queue in queues if any(not end[1].is_cancelled for end in queue)]
        if left:
            raise WrongSchedule(f"messages that nobody received, or receives of none: {left}")
        partly = [key for key, calls in self.collectives.items() if len(calls) < self.size]
        if partly:
            raise WrongSchedule(f"collectives in which not all took part: {partly}")


class Comm:
    """One process's view of a communicator."""

    def __init__(self, world, rank, name="world"):
        self.world, self.rank, self.size, self.name, self.count = world, rank, world.size, name, 0

    def _begin(self, signature, finish, is_early=False):
        """Take part in the next collective; it is complete when all have."""
        request, key = Request(self.world), (self.name, self.count)
        self.count += 1
        calls = self.world.collectives.setdefault(key, {})
        calls[self.rank] = signature, finish, request
        signatures = {call[0] for call in calls.values()}
        if len(signatures) > 1:
            by_rank = {rank: call[0] for rank, call in calls.items()}
            raise WrongSchedule(f"collective {key} differs: {by_rank}")
        if is_early and self.world.is_eager:
            request.complete()
        if len(calls) == self.size:
            for _, finish_call, _ in calls.values():
                finish_call({rank: call[1] for rank, call in calls.items()})
            for _, _, other in calls.values():
                if not other.is_complete:
                    other.complete()
        return request

    def _with_data(self, signature, data, take, is_early=False):
        finish = partial(self._take, take)
        finish.data = data.copy()
        return self._begin(signature, finish, is_early)

    @staticmethod
    def _take(take, finishes):
        take([finishes[rank].data for rank in sorted(finishes)])

    def Iallreduce(self, send, receive, operation):
        def take(parts):
            receive[:] = OPERATIONS[operation](parts, axis=0)

        return self._with_data(("Iallreduce", operation, len(send)), send, take)

    def Iallgather(self, send, receive):
        def take(parts):
            receive[:] = np.concatenate(parts)

        return self._with_data(("Iallgather", len(send)), send, take)

    def Iallgatherv(self, send, room_and_sizes):
        room, sizes = room_and_sizes
        if len(send) != sizes[self.rank]:
            raise WrongSchedule(f"process {self.rank} sends {len(send)}, and stated {sizes}")

        def take(parts):
            room[:] = np.concatenate(parts)

        return self._with_data(("Iallgatherv", *sizes.tolist()), send, take)

    def Ialltoall(self, send, receive):
        def take(parts):
            receive[:] = np.stack([part[self.rank] for part in parts])

        return self._with_data(("Ialltoall", send.size), send, take)

    def Ibcast(self, buffer, root):
        def take(parts):
            if self.rank != root:
                buffer[:] = parts[root]

        is_early = self.rank == root
        return self._with_data(("Ibcast", root, len(buffer)), buffer, take, is_early)

    def Ibarrier(self):
        return self._with_data(("Ibarrier",), np.zeros(0), lambda parts: None)

    def Dup(self):
        name = f"{self.name}.{self.count}"
        request = self._with_data(("Dup",), np.zeros(0), lambda parts: None)
        self.world.give_way(self.rank, request.Test)
        return Comm(self.world, self.rank, name)

    def Free(self):
        request = self._with_data(("Free",), np.zeros(0), lambda parts: None)
        self.world.give_way(self.rank, request.Test)

    def _queue(self, queues, source, destination, tag):
        return queues.setdefault((self.name, source, destination, tag), [])

    def _match(self, source, destination, tag):
        sent = self._queue(self.world.messages, source, destination, tag)
        wanted = self._queue(self.world.receives, source, destination, tag)
        wanted[:] = [receive for receive in wanted if not receive[1].is_cancelled]
        while sent and wanted:
            (data, sending), (room, receiving) = sent.pop(0), wanted.pop(0)
            if len(data) > len(room):
                raise WrongSchedule(f"{len(data)} bytes are sent into {len(room)}")
            room[: len(data)] = data
            sending.complete()
            receiving.complete()

    def Issend(self, data_and_type, peer, tag=0):
        request = Request(self.world)
        data = np.frombuffer(data_and_type[0], np.uint8).copy()
        self._queue(self.world.messages, self.rank, peer, tag).append((data, request))
        self.world.events += 1
        self._match(self.rank, peer, tag)
        return request

    def Irecv(self, room_and_type, peer, tag=0):
        request = Request(self.world)
        room = np.frombuffer(room_and_type[0], np.uint8)
        room.flags.writeable = True
        self._queue(self.world.receives, peer, self.rank, tag).append((room, request))
        self._match(peer, self.rank, tag)
        return request

    def Iprobe(self, peer=None, tag=0, status=None):
        if peer is None:
            return False
        sent = self._queue(self.world.messages, peer, self.rank, tag)
        if sent and status is not None:
            status.nbytes = len(sent[0][0])
        return bool(sent)


class ModelTeam(MpiTeam):
    """The team as it is, over the simulated communicator; waiting gives way."""

    def __init__(self, world, rank):
        super().__init__(world.mpi, Comm(world, rank), owns_mpi=False)
        self._world = world

    def _until(self, test, on_progress=None):
        while not test():
            events = self._world.events
            if on_progress:
                on_progress(0)
                if test():
                    return
                self._world.give_way(
                    self.rank, lambda seen=events: self._world.events > seen, is_poll=True
                )
            else:
                self._world.give_way(self.rank, test)

    def poll(self):
        """Stand where a process does local work: others may run before it goes on."""
        self._world.give_way(self.rank, is_poll=True)

    def check_stall(self, waited):
        pass

    def abort(self, message, code):
        raise WrongSchedule(f"aborted: {message}")


def explore(size, program, check, most=200_000, *, is_eager=False):
    """Run a program under all schedules; return how many there are. check: is given the outcomes."""
    choices, count = [], 0
    while True:
        world = World(size, choices, is_eager=is_eager)
        try:
            check(world.run(program))
        except BaseException as error:
            error.add_note(f"schedule {world.choices}") if hasattr(error, "add_note") else None
            raise
        count += 1
        assert count <= most, "more schedules than expected"
        choices = world.choices
        while choices and choices[-1] + 1 >= world.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return count
        choices[-1] += 1


__all__ = ["PointToPoint", "WrongSchedule", "explore"]
