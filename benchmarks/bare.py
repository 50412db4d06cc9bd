"""Bare kernel launches, timed the way docs/performance.md reports them.

A CUDA graph of 128 launches that rotates over 16 different `wq_b` (201 MB at H = 32, K = 1536, so
that L2 is cold), no PDL; the figure is microseconds per launch, the median of 15 replays. A replay
of the floor's graph runs right before each timed one, so that none follows a heavier one's heat or
an idle GPU. Everything that is compared is timed in one run, because machines and runs differ by
7-10 %."""

import ctypes
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsa_front._runtime import library

LAUNCHES, REPLAYS = 128, 15

FLOOR_SOURCE = Path(__file__).with_name("floor.cu")


class FrontParams(ctypes.Structure):
    """`FrontParams` of csrc_glue/front_params.h."""

    _fields_ = (
        ("projected", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("wq_b", ctypes.c_void_p),
        ("layer", ctypes.c_void_p),
        ("projected_pitch", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("q_norm_layer_stride", ctypes.c_int32),
        ("wq_b_layer_rows", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("key_eps", ctypes.c_float),
        ("weight_scale", ctypes.c_float),
        ("head_weights_pitch", ctypes.c_int32),
        ("head_weights", ctypes.c_void_p),
        ("head_start", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_scale", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("key_norm_weight", ctypes.c_void_p),
        ("key_norm_bias", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("cache_layer_stride", ctypes.c_int64),
        ("key_pitch", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("key_norm_weight_layer_stride", ctypes.c_int32),
        ("key_norm_bias_layer_stride", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("head_start_limit", ctypes.c_int32),
    )


class ScoresParams(ctypes.Structure):
    """`ScoresParams` of csrc_glue/scores_params.h."""

    _fields_ = (
        ("block_table", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("layer", ctypes.c_void_p),
        ("flags", ctypes.c_int32),
        ("static_layer", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("pages", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("rows_per_sequence", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("groups_per_sequence", ctypes.c_int32),
        ("reciprocal", ctypes.c_int32),
        ("ctas_per_group", ctypes.c_int32),
        ("groups_with_more", ctypes.c_int32),
        ("entries", ctypes.c_int32),
        ("groups_per_entry", ctypes.c_int32),
        ("search_steps", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_scale", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
    )


FORMAT_FLAGS = {"fp8": 0, "mxfp8": 8, "mxfp4": 16}  # FrontFlags
# ScoresFlags
SCORES_TABLE_64, SCORES_LENGTHS_64, SCORES_WEIGHTS_BF16, SCORES_MXFP8, SCORES_FILL = 1, 2, 4, 8, 16


def check(result):
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"driver call failed: {status}")
    return values[0] if len(values) == 1 else values


def launch_front(k, params, heads, wq_b_rows, stream):
    """The handler's own choice of kernels and launches, on device 0; `wq_b_rows` over all
    layers."""
    message = ctypes.create_string_buffer(1024)
    failed = library.handler.JaxDsaFrontIndexFrontLaunch(
        0,
        k,
        ctypes.byref(params),
        heads,
        ctypes.c_int64(wq_b_rows),
        ctypes.c_void_p(int(stream)),
        message,
        len(message),
    )
    if failed:
        raise RuntimeError(message.value.decode())


def launch_scores(params, heads, page_size, cache_format, stream):
    """The handler's own choice of a scorer and its launch, on device 0."""
    message = ctypes.create_string_buffer(1024)
    failed = library.handler.JaxDsaFrontIndexScoresLaunch(
        0,
        int(cache_format == "mxfp4"),
        ctypes.byref(params),
        heads,
        page_size,
        ctypes.c_void_p(int(stream)),
        message,
        len(message),
    )
    if failed:
        raise RuntimeError(message.value.decode())


class Graphs:
    """Captures and times graphs of launches on a stream of its own."""

    def __init__(self):
        from cuda.bindings import driver

        self.driver = driver
        jax.block_until_ready(jnp.zeros(1))  # makes JAX's context current on this thread
        check(driver.cuInit(0))
        self.context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
        check(driver.cuCtxSetCurrent(self.context))
        self.stream = check(driver.cuStreamCreate(1))
        self.events = [check(driver.cuEventCreate(0)) for _ in range(2)]

    def capture(self, launch, count=LAUNCHES):
        """A graph of launch(0), launch(1), ..."""
        d = self.driver
        check(
            d.cuStreamBeginCapture(
                self.stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            )
        )
        for i in range(count):
            launch(i)
        return check(d.cuGraphInstantiate(check(d.cuStreamEndCapture(self.stream)), 0))

    def time(self, graphs, before, count=LAUNCHES, replays=REPLAYS):
        """Microseconds per launch of each graph (medians); the replays of all graphs alternate,
        each behind one of the graph `before`."""
        d, samples = self.driver, {name: [] for name in graphs}
        for turn in range(replays + 2):
            for name, graph in graphs.items():
                check(d.cuGraphLaunch(before, self.stream))
                check(d.cuEventRecord(self.events[0], self.stream))
                check(d.cuGraphLaunch(graph, self.stream))
                check(d.cuEventRecord(self.events[1], self.stream))
                check(d.cuStreamSynchronize(self.stream))
                if turn >= 2:
                    samples[name].append(check(d.cuEventElapsedTime(*self.events)) * 1e3 / count)
        return {name: statistics.median(values) for name, values in samples.items()}

    def floor(self, weights):
        """Launches of the floor kernel over the rotating weights (H = 32, K = 1536)."""
        from cuda.bindings import nvrtc

        program = check(nvrtc.nvrtcCreateProgram(FLOOR_SOURCE.read_bytes(), b"floor.cu", 0, [], []))
        check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"]))
        image = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, image))
        d = self.driver
        self.module = check(d.cuModuleLoadData(image))
        function = check(d.cuModuleGetFunction(self.module, b"floor_copy"))
        attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        carveout = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        shared = 8 * 12288
        check(d.cuFuncSetAttribute(function, attribute, shared))
        check(d.cuFuncSetAttribute(function, carveout, 100))
        cluster = d.CUlaunchAttribute()
        cluster.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 4, 1, 1
        config = d.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 4, 32, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 288, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.stream
        config.attrs, config.numAttrs = [cluster], 1
        pointers = [int(w.unsafe_buffer_pointer()) for w in weights]

        def launch(i):
            values = (pointers[i % len(pointers)], 0)
            check(
                d.cuLaunchKernelEx(
                    config, function, (values, (ctypes.c_void_p, ctypes.c_void_p)), 0
                )
            )

        return launch


class Front:
    """Buffers and bare launches of one shape; `outputs()` for checking the bytes."""

    def __init__(
        self, graphs, weights, batch, cache_format="fp8", heads=32, k=1536, page_size=64, seed=0
    ):
        rng = np.random.default_rng(seed)
        width = k + 128 + heads
        row = 68 if cache_format == "mxfp4" else 132
        self.graphs, self.batch, self.heads, self.k = graphs, batch, heads, k
        self.projected = jnp.asarray(rng.standard_normal((batch, width)), jnp.bfloat16)
        self.q_norm = jnp.asarray(1 + 0.1 * rng.standard_normal(k), jnp.bfloat16)
        self.key_norm = jnp.asarray(np.stack([np.ones(128), np.zeros(128)]), jnp.float32)
        pages = max(8, -(-batch // page_size))
        self.cache = jnp.zeros((pages, page_size, row), jnp.uint8)
        self.slots = jnp.asarray(rng.permutation(pages * page_size)[:batch], jnp.int32)
        self.query = jnp.zeros((batch, heads, 64 if row == 68 else 128), jnp.uint8)
        self.query_scale = jnp.zeros((batch, heads), jnp.uint32)
        self.head_weights = jnp.zeros((batch, heads), jnp.bfloat16)
        self.weights = weights
        buffers = {
            "projected": self.projected,
            "q_norm": self.q_norm,
            "key_norm_weight": self.key_norm,
            "cache": self.cache,
            "slots": self.slots,
            "query": self.query,
            "query_scale": self.query_scale,
            "weights": self.head_weights,
            "rows": jnp.zeros((batch, k), jnp.bfloat16),
        }
        self.buffers = jax.block_until_ready(buffers)
        pointers = {name: int(array.unsafe_buffer_pointer()) for name, array in buffers.items()}
        self.params = FrontParams(
            **pointers,
            key_norm_bias=pointers["key_norm_weight"] + 512,
            key=pointers["projected"] + 2 * k,
            head_weights=pointers["projected"] + 2 * (k + 128),
            num_slots=pages * page_size,
            projected_pitch=2 * width,
            key_pitch=2 * width,
            head_weights_pitch=2 * width,
            page_size=page_size,
            batch=batch,
            flags=FORMAT_FLAGS[cache_format],
            eps=1e-6,
            key_eps=1e-6,
            weight_scale=(heads * 128) ** -0.5,
        )

    def launch(self, i):
        self.params.wq_b = int(self.weights[i % len(self.weights)].unsafe_buffer_pointer())
        launch_front(self.k, self.params, self.heads, self.heads * 128, self.graphs.stream)


def rotating_weights(count=16, heads=32, k=1536):
    keys = jax.random.split(jax.random.key(0), count)
    make = jax.jit(lambda key: jax.random.normal(key, (heads * 128, k), jnp.bfloat16) * k**-0.5)
    return [make(key).block_until_ready() for key in keys]
