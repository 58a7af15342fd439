/* Moments of CPU tensors, and folding of rows: a plain C ABI for ctypes, without Python, torch or state; and where Python's
 * headers are, functions that take tensors as they are (tensors.h), and what a hook does with them (passing.h).
 *
 * Numerics: sums of powers about a center near the mean, scaled by a power of two, in the tensor's own
 * arithmetic type (fp32 for the half types), every 32 elements of a lane into f64. A span of 32768 elements is read once:
 * its center is the mean of the span before it (at first, of a sample), and where that turns out too far from its own
 * mean, or the scale unfit, it is read again about the mean just found. Spans merge in f64 by Pebay's formulas
 * (SAND2008-6212, eq. 3.1) into segments, segments into the tensor, always in the same order: the number of threads
 * does not change a bit of the result.
 */
#if defined(__has_include)
#if __has_include(<Python.h>)
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif
#endif
/* A module that does not say otherwise would switch the GIL on again where Python runs without it. */
#if defined(Py_PYTHON_H) && !defined(Py_GIL_DISABLED) && !defined(PYPY_VERSION)
#define HAS_PYTHON 1
#else
#define HAS_PYTHON 0
#endif

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if (defined(__GNUC__) || defined(__clang__)) && (defined(__x86_64__) || defined(__i386__))
#include <immintrin.h>
#define HAS_X86 1
#else
#define HAS_X86 0
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define HAS_THREADS 1
#else
#define HAS_THREADS 0
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#define GATHERED 8192
#define SPAN 32768
#define SEGMENT ((int64_t)SPAN * 8)
#define STRIP 2048
#define MAX_DIMS 64
#define MAX_THREADS 16

enum { WITH_CHECKSUM = 1, ACCUMULATE = 2 };

typedef float f32_t;
typedef double f64_t;

#include "stats.h"

#define ISA portable
#define TARGET
#define LANES_FILE "lanes_portable.h"
#include "isa.h"

#if HAS_X86
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES_FILE "lanes_avx2.h"
#include "isa.h"

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")))
#define LANES_FILE "lanes_avx512.h"
#include "isa.h"
#endif

#include "measure.h"
#include "reading.h"

#define ISA_TABLE(isa) \
    {{span_f32_##isa, span_f64_##isa, span_bf16_##isa, span_f16_##isa}, \
     {zeros_f32_##isa, zeros_f64_##isa, zeros_bf16_##isa, zeros_f16_##isa}, \
     {below_f32_##isa, below_f64_##isa, below_bf16_##isa, below_f16_##isa}, \
     gather_##isa, \
     {squares_f32_##isa, squares_f64_##isa, squares_bf16_##isa, squares_f16_##isa}}
static const Isa isas[] = {
    ISA_TABLE(portable),
#if HAS_X86
    ISA_TABLE(avx2),
    ISA_TABLE(avx512),
#endif
};

/* Grows when the arguments of a function change. */
EXPORT int sentinel_interface(void) { return 6; }

/* The best instruction set this CPU has: 0 portable, 1 AVX2, 2 AVX-512. */
EXPORT int sentinel_best_isa(void)
{
#if HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

#include "work.h"

/* Measure `num` tensors into Stats words `out_stride` bytes apart. With ACCUMULATE the numbers are merged into what stands
 * there. layouts: NULL where all are contiguous; else its first `num` words say, tensor by tensor, at which word of it
 * stand the number of dimensions, the sizes and the strides in elements, or 0 for a contiguous one. `isa_index` as
 * sentinel_best_isa says, or less. Returns 0, or 1 + the index of a tensor whose dtype code or number of dimensions is
 * beyond what is known (then nothing was written), or -1 where there is no memory. */
EXPORT int64_t sentinel_measure(int64_t num, const uint64_t *pointers, const int64_t *numels, const uint8_t *dtypes,
                                const int64_t *layouts, char *out, int64_t out_stride, double zero_eps, int32_t flags,
                                int32_t num_threads, int32_t isa_index)
{
    int64_t total = 0;
    for (int64_t t = 0; t < num; t++) {
        if (dtypes[t] >= NUM_DTYPES || (layouts && layouts[t] && layouts[layouts[t]] > MAX_DIMS)) return 1 + t;
        total += numels[t];
    }
    const Tensors tensors = {pointers, numels, dtypes, layouts, out, out_stride, zero_eps, flags, &isas[isa_index]};
#if HAS_THREADS
    /* A thread costs some 20 us. */
    int64_t useful = total / WORTH_A_THREAD;
    if (useful > MAX_THREADS) useful = MAX_THREADS;
    if (num_threads > useful) num_threads = (int32_t)useful;
    if (num_threads > 1) return measure_in_threads(&tensors, num, num_threads);
#endif
    for (int64_t t = 0; t < num; t++) measure_here(&tensors, t);
    return 0;
}

/* The same for one tensor, for hooks: fewer arguments to convert. shape: NULL for a contiguous tensor, else its sizes and
 * then its strides in elements. */
EXPORT int64_t sentinel_measure_one(uint64_t pointer, int64_t numel, int32_t dtype, int32_t num_dims, const int64_t *shape,
                                    char *out, double zero_eps, int32_t flags, int32_t num_threads, int32_t isa_index)
{
    const uint8_t code = dtype >= 0 && dtype < NUM_DTYPES ? (uint8_t)dtype : NUM_DTYPES;
    int64_t layout[2 + 2 * MAX_DIMS];
    if (!shape || num_dims < 0 || num_dims > MAX_DIMS)
        return sentinel_measure(1, &pointer, &numel, &code, NULL, out, 96, zero_eps, flags, num_threads, isa_index);
    layout[0] = 1;
    layout[1] = num_dims;
    memcpy(layout + 2, shape, 2 * (size_t)num_dims * sizeof *shape);
    return sentinel_measure(1, &pointer, &numel, &code, layout, out, 96, zero_eps, flags, num_threads, isa_index);
}

#include "probes.h"
#include "rows.h"
#include "compiled_plan.h"
#include "digest.h"
#include "groups.h"
#include "crc.h"
#include "rolling.h"
#include "fast_rules.h"

#if HAS_PYTHON
#include "tensors.h"
#include "passing.h"
#include "module.h"
#endif
