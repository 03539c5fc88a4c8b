#!/usr/bin/env python3
"""Makes ptx_src/fallback/*.ptx: norm_strided.cu for each element type, as PTX that old drivers load.

    make_fallback.py [--nvrtc LIBRARY]     write the files
    make_fallback.py --check               exit 1 when the sources have changed since; exit 0 otherwise

Each file begins with a line that records the NVRTC version and the hash of the source it was made from.
The same NVRTC version gives the same bytes. PTX's .version is lowered to the least that has every
instruction used here (6.3, with sm_75), so that drivers since CUDA 10 take it.
"""
import argparse
import ctypes
import re
import sys

import amalgamate

TYPES = {"f16": "nji_f16", "bf16": "nji_bf16", "f32": "float", "f64": "double"}
FOLDER = amalgamate.KERNELS / "fallback"
OPTIONS = ["--gpu-architecture=compute_75", "--std=c++14", "-DNJI_PARAM_CODE=p.param_dtype",
           "-DNJI_STAT_CODE=p.stat_dtype", "-DNJI_FORWARD=1", "-DNJI_BACKWARD=1"]


def source():
    files = amalgamate.PROGRAMS["strided"]
    return "".join(amalgamate.strip_comments(amalgamate.read(amalgamate.KERNELS / f)) for f in files)


def source_line():
    return f"source {amalgamate.fnv1a(source().encode()):016x}"


def check(result, what):
    if result != 0:
        sys.exit(f"{what} failed with {result}")


def compile_ptx(nvrtc, text, options):
    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"norm_strided.cu", 0, None,
                                   None), "nvrtcCreateProgram")
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    result = nvrtc.nvrtcCompileProgram(program, len(options), array)
    if result != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(log.value.decode())
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)), "nvrtcGetPTXSize")
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx), "nvrtcGetPTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def slim(ptx):
    """Without comments, indentation, blank lines and hints to newer assemblers."""
    ptx = re.sub(r"^.pragma .*\n", "", amalgamate.strip_comments(ptx), flags=re.M)
    return re.sub(r"^\.version .*$", ".version 6.3", ptx, flags=re.M)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nvrtc", default="libnvrtc.so")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        for name in TYPES:
            if source_line() not in (FOLDER / f"{name}.ptx").read_text().split("\n")[0]:
                sys.exit(f"ptx_src/fallback/{name}.ptx is stale: run tools/make_fallback.py")
        return
    nvrtc = ctypes.CDLL(options.nvrtc)
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    for name, type_name in TYPES.items():
        ptx = slim(compile_ptx(nvrtc, source(), OPTIONS + [f"-DNJI_X={type_name}"]))
        head = f"// NVRTC {major.value}.{minor.value}, {source_line()}\n"
        (FOLDER / f"{name}.ptx").write_bytes((head + ptx).encode("ascii"))


if __name__ == "__main__":
    main()
