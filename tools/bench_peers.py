#!/usr/bin/env python3
"""Times normjit and its peers in one process, on the same buffers, and prints one table of ratios.

The peers are whatever can be imported: PyTorch eager, torch.compile, cuDNN's graph API, Liger's
Triton kernels. Needs torch, and a C compiler for normjit itself. The shapes are those of `bench
--list`. On a GPU each measurement is a CUDA graph of calls over buffer sets that together exceed
four times 60 MB of L2, outputs of a set kept apart, long enough to last 2 ms; the graphs of a shape
take turns, and the median of 7 replays counts. The roofline is the fastest of several elementwise
kernels that move the same bytes: dx = x + dy, or a copy. Every result is checked once a shape
against float64; a peer that fails or cannot do a shape is recorded as absent, with the reason.
`bench_peers.py --help` lists the options."""
import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import plot_bench

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROOT = Path(__file__).resolve().parent.parent
EPS = 1e-5
REPLAYS = 7
LEAST_MS = 2.0
BEYOND_CACHE = 256e6
MOST_SETS = 513
PAD = 64


class Absent(Exception):
    """This peer does not do this problem."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def first_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


# ---- problems ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """x has shape (outer, cols), channels-first (outer, cols, inner); the norm is over axis 1."""

    op: str
    dtype: str
    layout: str
    rows: int
    cols: int
    outer: int
    inner: int

    @property
    def backward(self):
        return self.op == "layer_norm_bwd"

    @property
    def channels_first(self):
        return self.layout == "channels-first"

    @property
    def shape(self):
        return (self.outer, self.cols) + ((self.inner,) if self.channels_first else ())

    @property
    def reads_dy(self):
        """Whether a whole dy must be read: the elementwise kernel then adds, else it copies."""
        return self.backward and self.layout != "broadcast-dy"

    @property
    def strides(self):
        if self.channels_first:
            return self.cols * self.inner, self.inner, 1
        return self.cols + (PAD if self.layout == "padded" else 0), 1

    def __str__(self):
        return f"{self.op} {self.dtype} {self.layout} {' x '.join(map(str, self.shape))}"


def compile_c(sources, output, *flags):
    subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-std=gnu11",
                    f"-I{ROOT / 'include'}", *flags, *sources, "-o", output,
                    "-lm", "-ldl", "-lpthread"], check=True)


def problems_of(suites, folder):
    """[(suite, problem)], without those that an earlier suite has."""
    program = f"{folder}/bench"
    compile_c([str(ROOT / "tools/bench.c")], program)
    found = {}
    for suite in suites:
        listed = subprocess.run([program, "--suite", suite, "--list", "--json"], check=True,
                                stdout=subprocess.PIPE).stdout
        for record in json.loads(listed):
            if record["op"] != "meta":
                found.setdefault(Problem(**record), suite)
    return [(suite, problem) for problem, suite in found.items()]


# ---- normjit through ctypes, as in normjit.h ---------------------------------------------------

RANK = 8
OPS = {"layer_norm_fwd": 1, "layer_norm_bwd": 2}
DTYPES = {"f16": 1, "bf16": 2, "f32": 3}
BACKENDS = {"cuda": 1, "cpu": 2}
SOURCE_FALLBACK_PTX = 3


class NjTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("offset", ctypes.c_int64), ("count", ctypes.c_int64),
                ("rank", ctypes.c_int32), ("shape", ctypes.c_int64 * RANK),
                ("stride", ctypes.c_int64 * RANK)]


class NjArgs(ctypes.Structure):
    _fields_ = [(name, NjTensor) for name in
                ("x", "dy", "gamma", "beta", "mean", "rstd", "y", "dx", "dgamma", "dbeta")]


class NjDesc(ctypes.Structure):
    _fields_ = [("rank", ctypes.c_int32), ("norm_axes", ctypes.c_uint32),
                ("shape", ctypes.c_int64 * RANK), ("op", ctypes.c_int32), ("dtype", ctypes.c_int32),
                ("param_dtype", ctypes.c_int32), ("stat_dtype", ctypes.c_int32),
                ("has_gamma", ctypes.c_int32), ("has_beta", ctypes.c_int32),
                ("eps", ctypes.c_double), ("grads", ctypes.c_uint32),
                ("accumulate", ctypes.c_uint32)]


class NjCtxDesc(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int32), ("flags", ctypes.c_uint32), ("backend", ctypes.c_int32),
                ("cache_dir", ctypes.c_char_p), ("cache_max_bytes", ctypes.c_uint64),
                ("driver_path", ctypes.c_char_p), ("nvrtc_path", ctypes.c_char_p),
                ("log", ctypes.c_void_p), ("log_user", ctypes.c_void_p)]


class NjSku(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in
                ("op", "dtype", "param_dtype", "stat_dtype", "layout", "backend", "source", "arch",
                 "arch_specific", "math", "grads", "accumulate", "threads", "vector_bytes",
                 "candidate")] + [
                     ("kernel", ctypes.c_char * 48)]


class Normjit:
    """The library, compiled to a shared object, and a ctx on the current device."""

    def __init__(self, device, folder, *flags):
        path = f"{folder}/libnormjit.so"
        compile_c(["-x", "c", str(ROOT / "include/normjit.h"), "-x", "none"], path, "-O2",
                  "-shared", "-fPIC", "-DNORMJIT_IMPLEMENTATION", *flags)
        self.lib = lib = ctypes.CDLL(path)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        lib.nj_last_error.restype = lib.nj_ctx_info.restype = ctypes.c_char_p
        lib.nj_ctx_info.argtypes = lib.nj_plan_destroy.argtypes = [pointer]
        lib.nj_plan_workspace_size.argtypes = [pointer]
        lib.nj_plan_workspace_size.restype = size
        lib.nj_plan_select.argtypes = [pointer] * 4
        lib.nj_plan_sku.argtypes = [pointer] * 3
        lib.nj_plan_run.argtypes = [pointer, pointer, pointer, size, pointer]
        self.ctx, self.plans = pointer(), []
        self.require(lib.nj_ctx_create(ctypes.byref(self.ctx),
                                       ctypes.byref(NjCtxDesc(backend=BACKENDS[device]))))
        self.info = lib.nj_ctx_info(self.ctx).decode()

    def require(self, status):
        if status:
            raise RuntimeError(self.lib.nj_last_error().decode())

    def select(self, problem):
        desc = NjDesc(rank=len(problem.shape), norm_axes=1 << 1, shape=problem.shape,
                      op=OPS[problem.op], dtype=DTYPES[problem.dtype], has_gamma=1, has_beta=1,
                      eps=0 if problem.backward else EPS)
        plan = ctypes.c_void_p()
        self.require(self.lib.nj_plan_select(ctypes.byref(plan), self.ctx, ctypes.byref(desc),
                                             None))
        self.plans.append(plan)
        return plan

    def release(self):
        """Destroys the plans that were selected; none of their runs may be executing."""
        while self.plans:
            self.lib.nj_plan_destroy(self.plans.pop())

    def sku(self, plan, args):
        sku = NjSku()
        self.require(self.lib.nj_plan_sku(plan, ctypes.byref(args), ctypes.byref(sku)))
        return sku

    def run(self, plan, args, workspace, size, stream):
        self.require(self.lib.nj_plan_run(plan, ctypes.byref(args), workspace, size, stream))


def nj_view(tensor):
    """Of a torch tensor. count stays 0: what lies around the view is no concern of the call."""
    return NjTensor(data=tensor.data_ptr(), rank=tensor.dim(), shape=tuple(tensor.shape),
                    stride=tuple(tensor.stride()))


def nj_args(problem, s):
    args = NjArgs(x=nj_view(s.x), gamma=nj_view(s.gamma), mean=nj_view(s.mean),
                  rstd=nj_view(s.rstd))
    if problem.backward:
        args.dy, args.dx = nj_view(s.dy), nj_view(s.out)
        args.dgamma, args.dbeta = nj_view(s.dgamma), nj_view(s.dbeta)
    else:
        args.beta, args.y = nj_view(s.beta), nj_view(s.out)
    return args


# ---- operands ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Operands:
    """One buffer set. words: x, dy, out as the elementwise kernel has them, packed and aligned."""

    x: object
    dy: object
    out: object
    gamma: object
    beta: object
    dgamma: object
    dbeta: object
    mean: object
    rstd: object
    words: tuple

    def results(self, problem):
        if problem.backward:
            return self.out, self.dgamma, self.dbeta
        return self.out, self.mean, self.rstd


class Bench:
    """A device, what runs on it, and how it is timed."""

    def __init__(self, torch, device, folder, compile_budget=math.inf):
        self.torch, self.device = torch, device
        self.cuda = device == "cuda"
        self.types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
        self.stream = None
        if self.cuda:
            torch.empty(1, device=device) # makes the CUDA context that normjit binds to
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)
        self.normjit = Normjit(device, folder, *([] if self.cuda else ["-fopenmp"]))
        self.compile_seconds, self.compile_budget = 0.0, compile_budget
        self.cudnn_handle = None

    def stream_handle(self):
        return self.stream.cuda_stream if self.cuda else None

    def wait(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def broken(self):
        """Whether an error took the CUDA context with it: then nothing more can be measured."""
        try:
            self.wait()
        except Exception:
            return True
        return False

    def operands(self, problem):
        """Buffer sets that together exceed the cache."""
        torch, dtype = self.torch, self.types[problem.dtype]
        cols = problem.cols
        size = problem.rows * cols * dtype.itemsize
        moved = (3 if problem.reads_dy else 2) * size
        sets = max(3, min(MOST_SETS, int(BEYOND_CACHE / moved) + 1)) if self.cuda else 3

        def buffers(count, elements):
            """Of each set so many, each from a multiple of 256 bytes on."""
            step = (elements + 127) // 128 * 128
            whole = [torch.randn(sets * step, dtype=dtype, device=self.device)
                     for _ in range(count)]
            return [[w[i * step:(i + 1) * step] for w in whole] for i in range(sets)]

        start = 1 if problem.layout == "misaligned" else 0
        full = buffers(3, problem.outer * problem.strides[0] + start)
        made = []
        for of_set, of_params in zip(full, buffers(4, cols)):
            x, dy, out = [b.as_strided(problem.shape, problem.strides, b.storage_offset() + start)
                          for b in of_set]
            if problem.layout == "broadcast-dy":
                dy = of_set[1][0].expand(problem.shape)
            gamma, beta, dgamma, dbeta = [p[:cols] for p in of_params]
            var, mean = torch.var_mean(x.float(), dim=1, correction=0, keepdim=True)
            words = tuple(b.view(torch.int32)[:size // 256 * 64] for b in of_set)
            made.append(Operands(x, dy, out, gamma, beta, dgamma, dbeta, mean,
                                 torch.rsqrt(var + EPS), words))
        return made

    # ---- timing

    def replay(self, call, sets):
        """(what runs it, calls in it): of whole turns over the sets."""
        return self.graph(call, sets) if self.cuda else (call, 1)

    def capture(self, call, sets, turns):
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        kept = [None] * sets # a result lives for a turn, so that outputs do not share memory
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(turns * sets):
                kept[i % sets] = call(i % sets)
        return graph

    def graph(self, call, sets):
        graph, turns = self.capture(call, sets, 1), 1
        ms = self.replay_ms([graph], 2)[0][-1]
        if ms < LEAST_MS:
            turns = int(1.2 * LEAST_MS / ms) + 1
            graph = self.capture(call, sets, turns)
        return graph, turns * sets

    def replay_ms(self, graphs, rounds):
        """Milliseconds of each replay: [graph][round]. The graphs take turns without a pause."""
        torch = self.torch
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) * rounds + 1)]
        graphs[-1].replay() # warms up
        for i, event in enumerate(events[:-1]):
            event.record()
            graphs[i % len(graphs)].replay()
        events[-1].record()
        self.wait()
        spans = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
        return [spans[i::len(graphs)] for i in range(len(graphs))]

    def microseconds(self, replays):
        """Median of a call of each, on the CPU of calls that take turns over the sets."""
        if self.cuda:
            spans = self.replay_ms([graph for graph, _ in replays], REPLAYS)
            return [1e3 * statistics.median(ms) / calls for ms, (_, calls) in zip(spans, replays)]
        spans = [[] for _ in replays]
        for turn in range(REPLAYS + 1):
            for k, (call, _) in enumerate(replays):
                start = time.perf_counter()
                call((turn * len(replays) + k) % 3)
                spans[k].append(1e6 * (time.perf_counter() - start))
        return [statistics.median(us[1:]) for us in spans]


# ---- the roofline ------------------------------------------------------------------------------

if triton:

    @triton.jit
    def elementwise(x, dy, out, words, ADD: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < words
        value = tl.load(x + i, mask=inside)
        if ADD:
            value += tl.load(dy + i, mask=inside)
        tl.store(out + i, value, mask=inside)


def rooflines(bench, problem, sets):
    """Calls that move the bytes of a norm, packed, by several kernels."""
    add = problem.reads_dy

    def by_torch(i):
        x, dy, out = sets[i].words
        if add:
            bench.torch.add(x, dy, out=out)
        else:
            out.copy_(x)

    def by_triton(block, warps):
        def call(i):
            x, dy, out = sets[i].words
            elementwise[(triton.cdiv(x.numel(), block),)](x, dy, out, x.numel(), ADD=add,
                                                          BLOCK=block, num_warps=warps)
        return call

    calls = [by_torch]
    if triton and bench.cuda:
        calls += [by_triton(*how) for how in ((1024, 8), (2048, 8), (4096, 8), (4096, 32))]
    x, dy, out = sets[0].words
    for call in calls:
        out.zero_()
        call(0)
        if not bench.torch.equal(out, x + dy if add else x):
            raise RuntimeError("the elementwise kernel computes something else")
    return calls


def roofline(bench, problem, sets):
    """The replay of the fastest."""
    calls = rooflines(bench, problem, sets)
    if not bench.cuda:
        return bench.replay(calls[0], len(sets))
    graphs = [bench.capture(call, len(sets), 1) for call in calls]
    medians = [statistics.median(ms) for ms in bench.replay_ms(graphs, 5)]
    return bench.replay(calls[medians.index(min(medians))], len(sets))


# ---- the libraries: each gives a call on set i that returns its results ------------------------


def by_normjit(bench, problem, sets):
    plan = bench.normjit.select(problem)
    size = bench.normjit.lib.nj_plan_workspace_size(plan)
    workspace = bench.torch.empty(size, dtype=bench.torch.uint8, device=bench.device)
    args = [nj_args(problem, s) for s in sets]
    sku = bench.normjit.sku(plan, args[0])
    if sku.source == SOURCE_FALLBACK_PTX:
        sys.exit("NVRTC was not found: timing the embedded PTX would say nothing about normjit")

    def call(i):
        bench.normjit.run(plan, args[i], workspace.data_ptr(), size, bench.stream_handle())
        return sets[i].results(problem)

    call.kernel = sku.kernel.decode()
    return call


def torch_function(torch, problem):
    """PyTorch has no norm over axis 1: eager, channels-first means transposing there and back."""
    aten, cols = torch.ops.aten, [problem.cols]

    def rows_last(t):
        return t.transpose(1, 2).contiguous() if problem.channels_first else t

    def backward(x, dy, mean, rstd, gamma, beta):
        dx, dgamma, dbeta = aten.native_layer_norm_backward(
            rows_last(dy), rows_last(x), cols, rows_last(mean), rows_last(rstd), gamma, beta,
            [True, True, True])
        return rows_last(dx), dgamma, dbeta

    def forward(x, gamma, beta):
        y, mean, rstd = aten.native_layer_norm(rows_last(x), cols, gamma, beta, EPS)
        return rows_last(y), rows_last(mean), rows_last(rstd)

    return backward if problem.backward else forward


def torch_call(function, problem, sets):
    def call(i):
        s = sets[i]
        if problem.backward:
            return function(s.x, s.dy, s.mean, s.rstd, s.gamma, s.beta)
        return function(s.x, s.gamma, s.beta)

    return call


def by_torch(bench, problem, sets):
    return torch_call(torch_function(bench.torch, problem), problem, sets)


def by_torch_compile(bench, problem, sets):
    if bench.compile_seconds >= bench.compile_budget:
        raise Absent("not compiled: --compile-budget-s is spent")
    torch = bench.torch
    start = time.monotonic()
    torch._dynamo.reset() # else the eighth shape silently runs eagerly
    call = torch_call(torch.compile(torch_function(torch, problem), dynamic=False, fullgraph=True),
                      problem, sets)
    try:
        call(0)
    finally:
        bench.compile_seconds += time.monotonic() - start
    return call


def require_rows(problem, *layouts):
    if problem.layout not in layouts:
        raise Absent(f"{problem.layout} is not tried: it takes {' or '.join(layouts)} operands")


def by_liger(bench, problem, sets):
    from liger_kernel.ops import layer_norm as liger

    require_rows(problem, "packed", "padded", "misaligned", "broadcast-dy")

    def call(i): # contiguous(): as Liger's own autograd function calls it
        s = sets[i]
        x = s.x.contiguous()
        if problem.backward:
            return liger.layer_norm_backward(s.dy.contiguous(), x, s.gamma, s.beta, s.mean.view(-1),
                                             s.rstd.view(-1))
        y, _, mean, rstd, _, _ = liger.layer_norm_forward(x, s.gamma, s.beta, EPS)
        return y, mean, rstd

    return call


def cudnn_graph(cudnn, handle, problem, form):
    """A graph of a packed problem, and its tensors in the order of cudnn_operands. form: how rows
    and cols become axes."""
    kinds = cudnn.data_type
    io = {"f16": kinds.HALF, "bf16": kinds.BFLOAT16, "f32": kinds.FLOAT}[problem.dtype]
    rows, cols = problem.rows, problem.cols
    full, stat, param, one = {
        "(rows, cols, 1, 1)": (([rows, cols, 1, 1], [cols, 1, cols, cols]),
                               ([rows, 1, 1, 1], [1, 1, 1, 1]),
                               ([1, cols, 1, 1], [cols, 1, cols, cols]), ([1] * 4, [1] * 4)),
        "(1, rows, cols)": (([1, rows, cols], [rows * cols, cols, 1]),
                            ([1, rows, 1], [rows, 1, 1]), ([1, 1, cols], [cols, cols, 1]),
                            ([1] * 3, [1] * 3)),
    }[form]
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=kinds.FLOAT,
                          compute_data_type=kinds.FLOAT, handle=handle)

    def tensor(name, place, kind, **more):
        return graph.tensor(name=name, dim=place[0], stride=place[1], data_type=kind, **more)

    x, gamma = tensor("x", full, io), tensor("gamma", param, io)
    if problem.backward:
        dy = tensor("dy", full, io)
        mean, rstd = tensor("mean", stat, kinds.FLOAT), tensor("rstd", stat, kinds.FLOAT)
        dx, dgamma, dbeta = graph.layernorm_backward(name="backward", grad=dy, input=x, scale=gamma,
                                                     mean=mean, inv_variance=rstd)
        outputs = ((dx, full, io), (dgamma, param, io), (dbeta, param, io))
        tensors = (x, gamma, dy, mean, rstd, dx, dgamma, dbeta)
    else:
        beta = tensor("beta", param, io)
        eps = tensor("eps", one, kinds.FLOAT, is_pass_by_value=True)
        y, mean, rstd = graph.layernorm(name="forward", input=x, scale=gamma, bias=beta,
                                        norm_forward_phase=cudnn.norm_forward_phase.TRAINING,
                                        epsilon=eps)
        outputs = ((y, full, io), (mean, stat, kinds.FLOAT), (rstd, stat, kinds.FLOAT))
        tensors = (x, gamma, beta, eps, y, mean, rstd)
    for output, place, kind in outputs:
        output.set_output(True).set_data_type(kind).set_dim(place[0]).set_stride(place[1])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, tensors


def cudnn_operands(problem, s, eps):
    if problem.backward:
        return s.x, s.gamma, s.dy, s.mean, s.rstd, s.out, s.dgamma, s.dbeta
    return s.x, s.gamma, s.beta, eps, s.out, s.mean, s.rstd


def by_cudnn(bench, problem, sets):
    """The plan that cuDNN's heuristics put first."""
    import cudnn

    require_rows(problem, "packed")
    torch = bench.torch
    if bench.cudnn_handle is None:
        bench.cudnn_handle = cudnn.create_handle()
        cudnn.set_stream(handle=bench.cudnn_handle, stream=bench.stream_handle())
    refusals = []
    for form in ("(rows, cols, 1, 1)", "(1, rows, cols)"):
        try:
            graph, tensors = cudnn_graph(cudnn, bench.cudnn_handle, problem, form)
            break
        except Exception as error:
            refusals.append(f"as {form}: {first_line(error)}")
    else:
        raise Absent("cuDNN has no plan; " + "; ".join(refusals))
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8,
                            device=bench.device)
    eps = torch.full((1,), EPS) # on the CPU: passed by value
    ids = [tensor.get_uid() for tensor in tensors]
    packs = [{uid: operand.data_ptr() for uid, operand in zip(ids, cudnn_operands(problem, s, eps))}
             for s in sets]

    def call(i):
        graph.execute(packs[i], workspace.data_ptr(), handle=bench.cudnn_handle)
        return sets[i].results(problem)

    call.eps = eps # lives as long as the pointers to it
    return call


LIBRARIES = {"normjit": by_normjit, "cudnn": by_cudnn, "torch": by_torch,
             "torch_compile": by_torch_compile, "liger": by_liger}
CHEAP = {"normjit", "torch"} # nothing to compile: measured in the sweep, and when time is over
MODULES = {"cudnn": "cudnn", "liger": "liger_kernel.ops.layer_norm"} # that may be missing


# ---- checks ------------------------------------------------------------------------------------


def reference(bench, problem, s):
    """[(value, tolerance)] of each result, in float64, from the operands as they are.

    A result is rounded once to its type, hence 2 eps(type) |value|. Arithmetic is in f32: a term
    has some rounding errors of its own and a sum adds some more, which are random and mostly
    cancel: 16 eps(f32) times the sum of the magnitudes is generous, and tight enough to notice a
    partial sum that was kept in a narrower type."""
    torch = bench.torch
    narrow = 2 * torch.finfo(bench.types[problem.dtype]).eps
    f32 = torch.finfo(torch.float32).eps
    x, gamma = s.x.double(), s.gamma.double()
    beta = s.beta.double()
    if problem.channels_first:
        gamma, beta = gamma[:, None], beta[:, None]
    if not problem.backward:
        var, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        rstd = torch.rsqrt(var + EPS)
        y = (x - mean) * rstd * gamma + beta
        mean_size = x.abs().mean(dim=1, keepdim=True)
        # the mean's own error stays whole where x is close to it, hence the sizes and not x - mean
        size = (x.abs() + mean_size) * rstd * gamma.abs() + beta.abs()
        return [(y, narrow * y.abs() + 16 * f32 * size), (mean, 16 * f32 * mean_size),
                (rstd, 16 * f32 * rstd)]
    mean, rstd, dy = s.mean.double(), s.rstd.double(), s.dy.double()
    xhat = (x - mean) * rstd
    g = dy * gamma
    dx = rstd * (g - g.mean(dim=1, keepdim=True) - xhat * (g * xhat).mean(dim=1, keepdim=True))
    size = rstd * (g.abs() + g.abs().mean(dim=1, keepdim=True) +
                   xhat.abs() * (g * xhat).abs().mean(dim=1, keepdim=True))
    rows = [d for d in range(x.dim()) if d != 1]
    expected = [(dx, narrow * dx.abs() + 16 * f32 * size)]
    for terms in (dy * xhat, dy):
        total = terms.sum(dim=rows)
        expected.append((total, narrow * total.abs() + 16 * f32 * terms.abs().sum(dim=rows)))
    return expected


def check(problem, results, expected):
    names = ("dx", "dgamma", "dbeta") if problem.backward else ("y", "mean", "rstd")
    for name, result, (value, tolerance) in zip(names, results, expected):
        excess = (result.double().reshape(value.shape) - value).abs() / (tolerance + 1e-300)
        worst = excess.max().item()
        if not worst <= 1: # NaN, too
            raise Absent(f"{name} is wrong: {worst:.3g} times the tolerance")


# ---- a run -------------------------------------------------------------------------------------


def measure(bench, suite, problem, names):
    """The records of one problem, one for each library."""
    sets = bench.operands(problem)
    expected = reference(bench, problem, sets[0])
    replays, absent, calls = {"roofline": roofline(bench, problem, sets)}, {}, {}
    for name in names:
        try:
            calls[name] = LIBRARIES[name](bench, problem, sets)
            for output in sets[0].results(problem):
                output.fill_(math.nan)
            check(problem, calls[name](0), expected)
            replays[name] = bench.replay(calls[name], len(sets))
        except Exception as error:
            absent[name] = str(error) if isinstance(error, Absent) else first_line(error)
            if bench.broken():
                raise
    times = dict(zip(replays, bench.microseconds(list(replays.values()))))
    records = []
    for name in names:
        record = {"suite": suite, **dataclasses.asdict(problem), "impl": name,
                  "us": round(times[name], 3) if name in times else None,
                  "roofline_us": round(times["roofline"], 3)}
        if name in absent:
            record["absent"] = absent[name]
        if hasattr(calls.get(name), "kernel"):
            record["kernel"] = calls[name].kernel
        records.append(record)
    return records


def version_of(distribution):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def describe(bench, missing):
    """The record that says where and how the others were made."""
    torch = bench.torch
    meta = {"op": "meta", "date": datetime.date.today().isoformat(),
            "command": " ".join(["python3 tools/bench_peers.py"] + [
                Path(word).name for word in sys.argv[1:]]), # no reader has these folders
            "device": torch.cuda.get_device_name() if bench.cuda else "CPU",
            "normjit": bench.normjit.info, "torch": torch.__version__, "cuda": torch.version.cuda,
            "triton": getattr(triton, "__version__", None), "liger": version_of("liger-kernel"),
            "cudnn": torch.backends.cudnn.version() if bench.cuda else None,
            "cudnn_frontend": version_of("nvidia-cudnn-frontend")}
    meta = {key: value for key, value in meta.items() if value is not None}
    if missing:
        meta["not_importable"] = missing
    return meta


def save(path, records):
    """One record a line; renamed into place, so that a run cut short leaves what it has."""
    if not path:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "[" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def importable(names):
    """(those of the libraries that can be used, why not the others)."""
    missing = {}
    for name in names:
        try:
            if name in MODULES:
                importlib.import_module(MODULES[name])
        except Exception as error: # whatever a package does when its own needs are not met
            missing[name] = first_line(error)
    return [name for name in names if name not in missing], missing


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    peers = ",".join(name for name in LIBRARIES if name != "normjit")
    parser.add_argument("--suite", default="models,edge",
                        help="of bench: host, models, edge, sweep (that only beside PyTorch eager)")
    parser.add_argument("--peers", default=peers, help=f"some of {peers}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write records after each shape")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables, too")
    parser.add_argument("--budget-s", type=float, default=math.inf, metavar="N",
                        help="after so many seconds measure only normjit and PyTorch eager")
    parser.add_argument("--compile-budget-s", type=float, default=math.inf, metavar="N",
                        help="after so many seconds in torch.compile leave it out")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N shapes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: the host backend against PyTorch, f32 shapes only, as a check")
    chosen = parser.parse_args()
    unknown = set(chosen.peers.split(",")) - set(LIBRARIES) - {""}
    if unknown:
        parser.error(f"--peers: {', '.join(sorted(unknown))}")
    return chosen


def main():
    chosen = options()
    import torch

    asked = ["normjit"] + [name for name in LIBRARIES
                           if name in chosen.peers.split(",") and name != "normjit"]
    if chosen.device == "cpu":
        asked = [name for name in asked if name not in MODULES]
    names, missing = importable(asked)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        problems = problems_of(chosen.suite.split(","), folder)
        bench = Bench(torch, chosen.device, folder, chosen.compile_budget_s)
        if not bench.cuda:
            problems = [(suite, problem) for suite, problem in problems if problem.dtype == "f32"]
        problems = problems[:chosen.limit]
        records = [describe(bench, missing)]
        say(json.dumps(records[0], indent=4))
        for n, (suite, problem) in enumerate(problems, 1):
            in_time = time.monotonic() - start < chosen.budget_s and suite != "sweep"
            try:
                found = measure(bench, suite, problem,
                                [name for name in names if in_time or name in CHEAP])
            except Exception as error:
                say(f"{problem}: {first_line(error)}")
                if bench.broken():
                    say("the CUDA context is broken: nothing more is measured")
                    break
                continue
            finally:
                bench.normjit.release()
            records += found
            save(chosen.json, records)
            say(f"[{n}/{len(problems)} {time.monotonic() - start:.0f} s] {problem}: roofline "
                f"{found[0]['roofline_us']:.1f}; " + "; ".join(
                    r["impl"] + (f" {r['us']:.1f}" if r["us"] else f" absent ({r['absent']})")
                    for r in found))
            if bench.cuda:
                torch.cuda.empty_cache()
    text = plot_bench.report(records)
    print(text)
    if chosen.markdown:
        chosen.markdown.write_text(text, encoding="utf-8")
    if not any(record.get("impl") == "normjit" and record["us"] for record in records):
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
