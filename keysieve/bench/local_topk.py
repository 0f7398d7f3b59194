"""Times of the local top-N behind the scorer: `keysieve bench local-topk [--out FILE] [--only 64x16K]`.

What counts is what a step gains by it: the time of score and local top-N in one programmatic chain, less that of the
scorer alone, which writes no maxima even where the chain's does. `world` ranks' slots lie on this device. A case first
passes its gate: the words, and those pushed to every rank, are the reference's for rows sampled from the first input
set.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keysieve.bench import timing
from keysieve.bench.caches import make_pool
from keysieve.bench.places import require_file
from keysieve.bench.score import Case, make_inputs
from keysieve.checks import KeysieveError
from keysieve.kernels import sm90_score_config, sm90_score_host
from keysieve.kernels.local_topk_config import LocalTopkConfig, n_class_of, room_for
from keysieve.kernels.local_topk_host import LocalTopk
from keysieve.kernels.sharding_word import sharding_word
from keysieve.launch import Launcher
from keysieve.reference.local_topk import local_topk
from keysieve.spec import candidate_words, index_planes, pitch_of

INTERLEAVE = 64
SHAPES = ((1, 4096), (1, 16384), (8, 16384), (64, 16384), (1, 65536), (64, 65536), (128, 16384), (1, 524288))
POOL_PAGES = 80_000
KINDS = ("score", "plateau")


@dataclass(frozen=True)
class Shape:
    """rows x keys of one rank of `world`."""

    rows: int
    keys: int
    n: int
    world: int

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.keys >> 10}K_n{self.n}_w{self.world}"


class Subject:
    """Scorer and local top-N on rotating input sets."""

    def __init__(self, shape: Shape, pool: torch.Tensor, sets: int, config: LocalTopkConfig | None) -> None:
        device, self.shape = pool.device, shape
        self.inputs = make_inputs(Case(shape.name, (shape.keys,) * shape.rows), pool, sets)
        self.pool, self.planes = pool, index_planes(shape.keys)
        self.local = LocalTopk(
            lambda k, c: Launcher(k, c, device),
            n=shape.n,
            planes=self.planes,
            push=True,
            keys=shape.keys,
            sms=torch.cuda.get_device_properties(device).multi_processor_count,
            given=True,
            config=config,
        )
        layouts = ("pitched", sm90_score_config.PITCHED_TOPS)[: 1 + self.local.takes_maxima(shape.rows)]
        configs = [sm90_score_config.ScoreConfig("fp8_fp32", 32, 1, layout, "float32") for layout in layouts]
        self.scorers = [(config, Launcher(sm90_score_config.KERNEL, config, device)) for config in configs]
        self.lens = torch.full((shape.rows,), shape.keys * shape.world, dtype=torch.int32, device=device)
        pitch = pitch_of(shape.keys)
        memory = torch.empty(shape.rows * pitch * 9 // 8, dtype=torch.bfloat16, device=device)
        self.logits = memory[: shape.rows * pitch].view(shape.rows, pitch)
        self.tops = memory[shape.rows * pitch :].view(torch.int16) if len(layouts) == 2 else None
        size = candidate_words(shape.n, self.planes)
        self.pairs = -(-size // 2) + 1
        block = 2 * shape.world * shape.rows * self.pairs * 4
        self.slots = torch.zeros(shape.world, block, dtype=torch.int32, device=device)
        places = [self.slots[r].data_ptr() for r in range(shape.world)]
        self.peers = torch.tensor(places + [0] * (16 - shape.world), dtype=torch.int64, device=device)
        self.epoch = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        self.words = torch.empty(shape.rows, size, dtype=torch.int32, device=device)
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count

    def score(self, index: int, maxima: bool = True) -> None:
        """Score a set; with the maxima that the local top-N goes by, if it does."""
        i, s = self.inputs[index], self.shape
        word = sharding_word(s.world, 0, INTERLEAVE, s.keys * s.world)
        config, launch = self.scorers[-1 if maxima else 0]
        sm90_score_host.score_pitched(
            launch, config, i.query, self.pool, i.weights, self.lens, i.table, max_context=s.keys,
            logits=self.logits, flags=i.flags, blocks=self.blocks, sharding=word, tops=self.tops if maxima else None,
        )  # fmt: skip

    def push(self, words: torch.Tensor | None = None, chained: bool = True, flags: torch.Tensor | None = None) -> None:
        s = self.shape
        self.local.push(
            self.logits, self.lens, tops=self.tops, world=s.world, rank=0, interleave=INTERLEAVE, peers=self.peers,
            slots=0, max_rows=s.rows, epoch=self.epoch, site=3, words=words, chained=chained, settled=chained,
            flags=flags,
        )  # fmt: skip

    def chain(self, index: int) -> None:
        self.score(index)
        self.push()

    def gate(self, flatten: bool) -> None:
        """The words of sampled rows, and what every rank was sent, against the reference."""
        s = self.shape
        self.slots.zero_()
        if flatten:
            self.flatten()
        else:
            self.score(0)
        self.push(self.words, chained=not flatten)
        rows = sorted({0, s.rows // 3, s.rows - 1})
        logits = self.logits[rows, : s.keys].cpu()
        want, _ = local_topk(logits, torch.full((len(rows),), s.keys, dtype=torch.int32), s.n, self.planes)
        if not torch.equal(self.words[rows].cpu(), want):
            raise KeysieveError(f"{s.name}: words differ from the reference")
        sent = self.slots.view(s.world, 2, s.world, s.rows, self.pairs, 4)[:, 1, 0]
        sent = sent[..., :-1, 0::2].reshape(s.world, s.rows, -1)[..., : self.words.shape[1]]
        if not bool((sent == self.words).all()):
            raise KeysieveError(f"{s.name}: a rank was sent other words")

    def flatten(self) -> None:
        """Rows whose threshold lies in a plateau of zeros."""
        keep = self.shape.n // 2
        x = torch.randn(self.logits.shape, device=self.logits.device)
        at = x[:, : self.shape.keys].float().topk(keep, dim=1).values[:, -1:]
        self.logits.copy_((x - at).clamp_min(0))
        if self.tops is not None:
            bits = self.logits.view(torch.int16).int() & 0xFFFF
            keys = torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)
            self.tops.copy_(keys.view(-1, 8).amax(1).to(torch.int16))


def blocks_of(config: LocalTopkConfig) -> dict[str, Any]:
    """Blocks of a row, threads of a block and vectors that one holds; whether it is given maxima."""
    return {"blocks": config.cluster, "threads": config.threads, "held": config.held, "maxima": config.given}


def measure(shape: Shape, pool: torch.Tensor, config: LocalTopkConfig | None) -> tuple[timing.Record, float]:
    """Gate, then times: a record of the chain's surplus, and the kernel's time alone on a plateau."""
    device = pool.device
    size = shape.rows * shape.keys * 132
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    sets = timing.sets_for(size, l2, most=48)
    subject = Subject(shape, pool, sets, config)
    subject.gate(False)
    alone = timing.graph_time(lambda i: subject.score(i, maxima=False), sets=sets, bytes_per_set=size, device=device)
    chain = timing.graph_time(subject.chain, sets=sets, bytes_per_set=size, device=device)
    own = timing.graph_time(lambda _i: subject.push(chained=False), sets=1, bytes_per_set=0, device=device)
    subject.gate(True)
    plateau = timing.graph_time(lambda _i: subject.push(chained=False), sets=1, bytes_per_set=0, device=device)
    extra: dict[str, Any] = {
        "n": shape.n,
        "score_us": round(alone.us, 3),
        "chain_us": round(chain.us, 3),
        "own_launch_us": round(own.us, 3),
        "plateau_own_launch_us": round(plateau.us, 3),
        **blocks_of(subject.local.serves(shape.rows)),
    }
    surplus = timing.Timing(
        chain.us - alone.us, chain.us_min - alone.us_max, chain.us_max - alone.us_min, chain.iterations, chain.replays,
        chain.cached,
    )  # fmt: skip
    made = timing.record(
        "local_topk",
        shape.name,
        surplus,
        device,
        requests=shape.rows,
        keys=shape.keys,
        heads=32,
        format="fp8_fp32",
        numerics="fp32",
        world=shape.world,
        exact=True,
        extra=extra,
    )
    return made, plateau.us


def trace(shape: Shape, pool: torch.Tensor, config: LocalTopkConfig | None) -> None:
    """Print the clocks between the kernel's marks, for the first row, of the third launch."""
    subject = Subject(shape, pool, 1, config)
    cluster = subject.local.config.cluster
    marks = torch.zeros(shape.rows, 16, dtype=torch.int32, device=pool.device)
    for _ in range(3):
        subject.score(0)
        subject.push(flags=marks)
        torch.cuda.synchronize(pool.device)
    clocks = (marks[0] - marks[0, 0]).tolist()
    print(shape.name, cluster, clocks[:11], flush=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON-lines file to append to")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--shape", default="", metavar="THREADSxHELDxCLUSTER", help="another configuration, for comparison"
    )
    parser.add_argument("--longer", action="store_true", help="with --shape: rows may exceed the registers")
    parser.add_argument("--trace", action="store_true", help="with --shape: print clocks at the kernel's steps")
    args = parser.parse_args(argv)
    require_file("--out", args.out)
    device = torch.device("cuda", torch.cuda.current_device())
    pool = make_pool(POOL_PAGES, device)
    print(f"{'case':>20} {'surplus':>8} {'score':>8} {'chain':>8} {'alone':>7} {'plateau':>7}  (us)")
    for world, n in ((2, 1216), (8, 352)):
        for rows, keys in SHAPES:
            shape = Shape(rows, keys, n, world)
            if args.only not in shape.name:
                continue
            config = None
            if args.shape:
                threads, held, cluster = map(int, args.shape.split("x"))
                longer = args.longer
                room = room_for(index_planes(keys))
                config = LocalTopkConfig(True, n_class_of(n), threads, held, room, cluster, longer, args.trace)
            if args.trace:
                trace(shape, pool, config)
                continue
            made, plateau = measure(shape, pool, config)
            e = made.extra
            print(
                f"{shape.name:>20} {made.us:8.2f} {e['score_us']:8.2f} {e['chain_us']:8.2f} {e['own_launch_us']:7.2f}"
                f" {plateau:7.2f}",
                flush=True,
            )
            if args.out is not None:
                timing.append(args.out, made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
