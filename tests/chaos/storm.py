"""Draws faults from a seed and injects them, two at a time."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from random import Random

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.history import Recorder
from tests.chaos.sites import Sites

#: Faults that may happen at the same moment.
AT_ONCE = 2


class Storm:
    """The order and the details of the faults depend on the seed alone; when each meets which job does not."""

    def __init__(
        self,
        sites: Sites,
        recorder: Recorder,
        seed: int,
        count: int,
        calm_s: tuple[float, float],
        faults: Sequence[Fault] = FAULTS,
        on_fault: Callable[[int], None] = lambda _done: None,
    ) -> None:
        self._sites = sites
        self._recorder = recorder
        self._seed = seed
        self._count = count
        # Some come to nothing, because another one took their victim away.
        drawn = Random(f"{seed} storm").choices(faults, [fault.weight for fault in faults], k=2 * count)
        self._waiting = list(enumerate(drawn))[::-1]
        self._calm_s = calm_s
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._stop = threading.Event()
        self.injected: Counter[str] = Counter()
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"chaos-storm-{number}", daemon=True) for number in range(AT_ONCE)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not self._waiting or self.injected.total() >= self._count:
                    return
                number, fault = self._waiting.pop()
            rng = Random(f"{self._seed} fault {number}")
            with self._busy[fault.on]:
                self._inject(fault, rng)
            self._on_fault(self.injected.total())
            self._stop.wait(rng.uniform(*self._calm_s))

    def _inject(self, fault: Fault, rng: Random) -> None:
        self._recorder.happen(f"{fault.number} {fault.name} …")
        try:
            told = fault.inject(self._sites, rng, self._pause)
        except Exception as error:
            # Another fault took its victim away, e.g. a server that is down: shown, and counted apart.
            self.errors.append(f"{fault.name}: {type(error).__name__}: {error}")
            told = f"came to nothing: {error}"
        else:
            with self._lock:
                self.injected[fault.name] += 1
        self._recorder.happen(f"{fault.number} {fault.name}: {told}")

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)
