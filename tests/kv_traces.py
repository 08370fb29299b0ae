"""Requests made up to differ in what is worth keeping; each is a list of blocks, head to tail.

Blocks are numbers, new ones never seen before. The last block of most requests is only partly
full, so that no later request has it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import count

Request = list[int]
Arrival = tuple[float, Request]


class Writer:
    """Makes blocks and draws lots, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.lots = random.Random(seed)
        self._numbers = count()

    def blocks(self, least: int, most: int) -> Request:
        return [next(self._numbers) for _ in range(self.lots.randint(least, most))]

    def some(self, median: float, spread: float) -> Request:
        length = max(1, int(self.lots.lognormvariate(math.log(median), spread)))
        return self.blocks(length, length)


def in_order(arrivals: list[Arrival]) -> list[Request]:
    return [request for _, request in sorted(arrivals, key=lambda arrival: arrival[0])]


def talk(
    w: Writer, num: int, think: float, spread: float = 1.0, start: float = 0.0
) -> list[Arrival]:
    """Conversations, one new each second; some people stay much longer than others."""
    arrivals = []
    for begin in range(num):
        chain, at, patience = w.some(8, 1.0), start + begin, w.lots.betavariate(1.2, 1.8)
        while True:
            arrivals.append((at, chain + w.blocks(1, 1)))
            if w.lots.random() > patience or len(chain) > 100:
                break
            at += w.lots.lognormvariate(math.log(think), spread)
            chain = chain + w.some(3, 0.7)
    return arrivals


def use_tools(w: Writer, num: int, num_tools: int, change: float = 0.0) -> list[Arrival]:
    """Agents: a few long prompts shared by all, a few quick steps each; tools may be replaced."""
    tools = [w.blocks(5, 30) for _ in range(num_tools)]
    weights = [1 / (rank + 1) for rank in range(num_tools)]
    arrivals = []
    for begin in range(num):
        if w.lots.random() < change:
            tools[w.lots.randrange(num_tools)] = w.blocks(5, 30)
        chain, at = w.lots.choices(tools, weights)[0] + w.blocks(2, 10), float(begin)
        while True:
            arrivals.append((at, chain))
            if w.lots.random() < 0.5:
                break
            at += w.lots.expovariate(0.1)
            chain = chain + w.blocks(1, 4)
    return arrivals


def ask_documents(w: Writer, num: int, num_documents: int, skew: float) -> list[Arrival]:
    """Independent questions about documents, some of which are asked about more."""
    documents = [w.blocks(5, 40) for _ in range(num_documents)]
    weights = [1 / (rank + 1) ** skew for rank in range(num_documents)]
    drawn = w.lots.choices(documents, weights, k=num)
    return [(at, document + w.blocks(1, 1)) for at, document in enumerate(drawn)]


def conversations(seed: int = 0) -> list[Request]:
    return in_order(talk(Writer(seed), 700, think=60))


def quick_conversations(seed: int = 0) -> list[Request]:
    """Everyone answers at once: recency is all there is to know."""
    return in_order(talk(Writer(seed), 700, think=8, spread=0.5))


def slow_conversations(seed: int = 0) -> list[Request]:
    """New people come until the end."""
    arrivals = talk(Writer(seed), 700, think=400, spread=1.3)
    return in_order([arrival for arrival in arrivals if arrival[0] < 700])


def dying_conversations(seed: int = 0) -> list[Request]:
    """As the slow ones, but no new user comes in the second half: a few patient ones are left."""
    return in_order(talk(Writer(seed), 700, think=400, spread=1.3))


def agents(seed: int = 0) -> list[Request]:
    return in_order(use_tools(Writer(seed), 800, num_tools=40))


def changing_agents(seed: int = 0) -> list[Request]:
    return in_order(use_tools(Writer(seed), 800, num_tools=40, change=0.05))


def documents(seed: int = 0) -> list[Request]:
    """The hot set is larger than the tier."""
    return in_order(ask_documents(Writer(seed), 1500, num_documents=400, skew=0.8))


def loop(seed: int = 0) -> list[Request]:
    """The same prompts in the same order again and again, more than there is room for."""
    w = Writer(seed)
    prompts = [w.blocks(10, 20) for _ in range(60)]
    return [prompt + w.blocks(1, 1) for _ in range(20) for prompt in prompts]


def bursts(seed: int = 0) -> list[Request]:
    """A document is asked about a few times within a minute and never again: counting misleads."""
    w = Writer(seed)
    arrivals = []
    for begin in range(350):
        document, at = w.blocks(5, 40), 2.5 * begin
        for _ in range(w.lots.randint(1, 7)):
            arrivals.append((at, document + w.blocks(1, 1)))
            at += w.lots.expovariate(0.05)
    return in_order(arrivals)


def dying_favourites(seed: int = 0) -> list[Request]:
    """What was asked for a hundred times is not asked for again, three times over."""
    w = Writer(seed)
    requests = []
    for _ in range(3):
        favourites = [w.blocks(10, 30) for _ in range(20)]
        requests += [w.lots.choice(favourites) + w.blocks(2, 2) for _ in range(500)]
    return requests


def scans(seed: int = 0) -> list[Request]:
    """Conversations, and now and then a batch of long prompts that are used once."""
    w = Writer(seed)
    arrivals = talk(w, 600, think=30)
    for batch in range(6):
        arrivals += [(100.0 * batch + at / 2, w.blocks(20, 60)) for at in range(20)]
    return in_order(arrivals)


def counts_that_mislead(seed: int = 0) -> list[Request]:
    """First tools with large counts, then conversations in which only recency matters."""
    w = Writer(seed)
    tools = use_tools(w, 500, num_tools=20)
    end = max(at for at, _ in tools)
    return in_order(tools + talk(w, 500, think=10, spread=0.5, start=end))


def one_time_prompts(seed: int = 0) -> list[Request]:
    """Nothing ever comes back."""
    w = Writer(seed)
    return [w.blocks(5, 40) for _ in range(600)]


def system_prompts(seed: int = 0) -> list[Request]:
    """A few system prompts before questions that are asked once each."""
    return in_order(ask_documents(Writer(seed), 1500, num_documents=60, skew=1.1))


def shifting_favourites(seed: int = 0) -> list[Request]:
    """Half-way the least popular documents become the most popular ones."""
    w = Writer(seed)
    documents = [w.blocks(5, 40) for _ in range(150)]
    weights = [1 / (rank + 1) for rank in range(150)]
    before = w.lots.choices(documents, weights, k=800)
    after = w.lots.choices(documents[::-1], weights, k=800)
    return [document + w.blocks(1, 1) for document in before + after]


def mixture(seed: int = 0) -> list[Request]:
    w = Writer(seed)
    return in_order(talk(w, 400, think=60) + use_tools(w, 400, num_tools=40, change=0.02))


TRACES: dict[str, Callable[[int], list[Request]]] = {
    make.__name__: make
    for make in (
        conversations,
        quick_conversations,
        slow_conversations,
        dying_conversations,
        agents,
        changing_agents,
        documents,
        loop,
        bursts,
        dying_favourites,
        scans,
        counts_that_mislead,
        one_time_prompts,
        system_prompts,
        shifting_favourites,
        mixture,
    )
}
