"""gpt-oss-20b's two MXFP4 products of one or two tokens: right first, then µs of each kernel."""
from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

START = time.monotonic()
sys.path[:0] = filter(None, [__import__("os").environ.get("EXTRA_PACKAGES")])
import torch

from quire.kernels.activation import ClampedSwiGLU
from quire.kernels.experts import Routing
from quire.kernels.four_bits import E2M1_BITS, FourBitExperts
from quire.kernels.triton.experts import few_fours, hopper_few_fours, ring_few_fours, static_few_fours
from quire.kernels.triton.experts.tiles import FewShape

H = F = 2880
COUNT, TOP_K, QUARTER, LAYERS = 32, 4, 736, 2
ACT = ClampedSwiGLU(1.702, 7.0)
DTYPE = torch.bfloat16
COMPILERS, ROUNDS = 15, 9
DEV = "cuda"

TODAY = {"gate": ["4/128/2"], "down": ["4/128/4"]}
MINE = {
    "gate": ["4/4/1", "4/4/3", "2/2/1", "1/1/1", "1/1/3", "2/4/1"],
    "down": ["8/2/1", "8/2/2", "16/4/1", "4/1/2", "4/1/4", "4/2/2", "4/2/3"],
}
RING = {"gate": ["1/1/2", "1/2/1", "2/2/2", "4/4/1"], "down": ["4/1/3", "4/1/5", "8/2/2", "4/2/2"]}
STATIC = {"gate": ["4/4/3"], "down": ["8/4/3"]}


def shape(text):
    return tuple(int(each) for each in text.split("/"))


def kernels(which):
    """By name: (x, weights, routing, bias) to the result."""
    found = {}
    for text in TODAY[which]:
        found["today " + text] = (few_fours, FewShape(*shape(text)), False)
    for text in STATIC[which]:
        found["static " + text] = (static_few_fours, static_few_fours.Shape(*shape(text)), True)
    for text in RING[which]:
        found["ring " + text] = (ring_few_fours, ring_few_fours.Shape(*shape(text)), True)
    for text in MINE[which]:
        found["new " + text] = (hopper_few_fours, hopper_few_fours.Shape(*shape(text)), False)
    return found


def call(which, kernel, x, weights, routing, bias):
    module, form, has_fast = kernel
    fast = (True,) if has_fast else ()
    if which == "gate":
        return module.few_gated(x, weights, routing, ACT, bias, *fast, form)
    return module.few_summed(x, weights, routing, bias, *fast, form)


def make(rows, count=COUNT):
    codes = torch.randint(-(1 << 15), 1 << 15, (count, rows, QUARTER), dtype=torch.int16, device=DEV)
    scales = torch.randint(113, 122, (count, QUARTER // 32, rows, 4), dtype=torch.uint8, device=DEV)
    bias = torch.randn(count, rows, device=DEV).to(DTYPE)
    return FourBitExperts(codes, scales.view(torch.int32).view(count, QUARTER // 32, rows)), bias


def numbers(weights, expert, columns):
    """By plain operations, float64."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEV, dtype=torch.float64)
    codes = weights.codes[expert].int() & 0xFFFF
    parts = []
    for q, places in enumerate(E2M1_BITS):
        sign, high, low, fraction = [(codes >> place) & 1 for place in places]
        value = table[(high * 4 + low * 2 + fraction).long()] * (1 - 2 * sign)
        power = ((weights.words[expert] >> (8 * q)) & 255).T.double() - 127
        parts.append(value * torch.exp2(power).repeat_interleave(32, 1))
    return torch.cat(parts, 1)[:, :columns]


def right_gate(x, weights, routing, bias):
    out = []
    for token, experts in enumerate(routing.experts.tolist()):
        for expert in experts:
            both = numbers(weights, expert, H) @ x[token].double() + bias[expert].double()
            gate, up = both.to(DTYPE).double().chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
            out.append(gate * torch.sigmoid(1.702 * gate) * up)
    return torch.stack(out)


def right_down(x, weights, routing, bias):
    out = []
    for token, experts in enumerate(routing.experts.tolist()):
        total = 0
        for i, expert in enumerate(experts):
            one = numbers(weights, expert, F) @ x[token * TOP_K + i].double() + bias[expert].double()
            total = total + routing.weights[token, i].double() * one
        out.append(total)
    return torch.stack(out)


def routing_of(tokens, first):
    order = torch.arange(first, first + tokens * TOP_K, device=DEV).view(tokens, TOP_K) % COUNT
    return Routing(order, torch.rand(tokens, TOP_K, device=DEV).to(DTYPE))


def inputs(which, tokens):
    return torch.randn(tokens if which == "gate" else tokens * TOP_K, H, device=DEV).to(DTYPE)


def compile_some(number):
    jobs = [(which, name) for which in ("gate", "down") for name in kernels(which)]
    for which, name in jobs[number::COMPILERS]:
        weights, bias = make(2 * F if which == "gate" else H, 4)
        routing = Routing(torch.arange(4, device=DEV).view(1, 4), torch.rand(1, 4, device=DEV).to(DTYPE))
        try:
            call(which, kernels(which)[name], inputs(which, 1), weights, routing, bias)
            torch.cuda.synchronize()
        except Exception as error:
            print("NOT COMPILED", which, name, str(error)[:300], flush=True)


def graph_of(launches):
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return graph


def timed(graphs, launches, rounds=ROUNDS):
    found = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / launches)
    return {name: (statistics.median(times), min(times)) for name, times in found.items()}


def main():
    procs = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(COMPILERS)]
    limit = time.monotonic() + 32
    for each in procs:
        try:
            each.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            print("a compiler was ended", flush=True)
    print(f"compiled after {time.monotonic() - START:.0f} s", flush=True)
    torch.manual_seed(1)
    layers = [{"gate": make(2 * F), "down": make(H)} for _ in range(LAYERS)]
    wrong = set()
    for tokens in (1, 2):
        for which in ("gate", "down"):
            weights, bias = layers[0][which]
            x, routing = inputs(which, tokens), routing_of(tokens, 5)
            right = (right_gate if which == "gate" else right_down)(x, weights, routing, bias)
            line = []
            for name, kernel in kernels(which).items():
                try:
                    torch.empty(right.shape, device=DEV, dtype=DTYPE).fill_(float("nan"))
                    out = call(which, kernel, x, weights, routing, bias)
                    off = ((out.double() - right).norm() / right.norm()).item()
                except Exception as error:
                    off = float("nan")
                    print("FAILED", which, name, str(error)[:300], flush=True)
                if not off < 8e-3:
                    wrong.add((which, name))
                    line.append(f"WRONG {name}: {off:.2e}")
                elif name.startswith(("today", "new 4/4/1", "new 8/2/2")):
                    line.append(f"{name}: {off:.3e}")
            print(f"errors {which} {tokens} token(s): " + "; ".join(line), flush=True)
    best = {}
    for tokens in (1, 2):
        routings = [routing_of(tokens, first) for first in range(0, COUNT, tokens * TOP_K)]
        many = LAYERS * len(routings)
        for which in ("gate", "down"):
            x = inputs(which, tokens)
            graphs = {}
            for name, kernel in kernels(which).items():
                if (which, name) in wrong:
                    continue

                def launches(kernel=kernel):
                    for layer in layers:
                        weights, bias = layer[which]
                        for routing in routings:
                            call(which, kernel, x, weights, routing, bias)

                graphs[name] = graph_of(launches)
            times = timed(graphs, many)
            ordered = sorted(times, key=lambda name: times[name][0])
            best[tokens, which] = [name for name in ordered if name.startswith(("new", "static", "ring"))][:3]
            print(f"{which} {tokens} token(s), µs median (least): " + "; ".join(
                f"{name} {times[name][0]:.2f} ({times[name][1]:.2f})" for name in ordered), flush=True)
        pairs = [("today " + TODAY["gate"][0], "today " + TODAY["down"][0])]
        pairs += [("new 4/4/1", "new 8/2/2")]
        pairs += [(a, b) for a in best[tokens, "gate"] for b in best[tokens, "down"]]
        x, graphs = inputs("gate", tokens), {}
        for a, b in pairs:
            def launches(a=kernels("gate")[a], b=kernels("down")[b]):
                for layer in layers:
                    for routing in routings:
                        between = call("gate", a, x, layer["gate"][0], routing, layer["gate"][1])
                        call("down", b, between, layer["down"][0], routing, layer["down"][1])

            graphs[a + " + " + b] = graph_of(launches)
        times = timed(graphs, many)
        print(f"both, {tokens} token(s): " + "; ".join(
            f"{name} {times[name][0]:.2f} ({times[name][1]:.2f})"
            for name in sorted(times, key=lambda name: times[name][0])), flush=True)
    print(f"{time.monotonic() - START:.0f} s", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compile_some(int(sys.argv[1]))
    else:
        main()
