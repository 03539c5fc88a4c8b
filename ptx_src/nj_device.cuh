// What is particular to the device: types, conversions, wide accesses, exchange between threads,
// clusters, dependent launch. The kernels above it read as plain C.
//
// The build defines NJI_X, the element type: nji_f16, nji_bf16, float or double.

static_assert(sizeof(nji_problem) == NJI_PROBLEM_BYTES, "host and device disagree on nji_problem");

typedef long long nji_i64;

struct nji_f16 {
    unsigned short bits;
};
struct nji_bf16 {
    unsigned short bits;
};

// nj_dtype of the host.
#define NJI_CODE_F16 1
#define NJI_CODE_BF16 2
#define NJI_CODE_F32 3
#define NJI_CODE_F64 4

// nj_desc.grads of the host.
#define NJI_DX 1u
#define NJI_DGAMMA 2u
#define NJI_DBETA 4u

// Arithmetic and accumulators: double for double, else float.
template <typename T> struct nji_math {
    typedef float type;
};
template <> struct nji_math<double> {
    typedef double type;
};
typedef nji_math<NJI_X>::type nji_real;

/* A kernel uses some of these: the compiler's word on the others would fill the user's log. */
#define NJI_INLINE static __device__ __forceinline__ __attribute__((unused))

#if __CUDACC_VER_MAJOR__ >= 12
#define NJI_PARAMETER const __grid_constant__ nji_problem
#else
#define NJI_PARAMETER const nji_problem
#endif

// ---- conversions: round to nearest even; NaN stays NaN ------------------------------------------

NJI_INLINE float nji_f16_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

NJI_INLINE unsigned short nji_float_to_f16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

NJI_INLINE unsigned short nji_float_to_bf16(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    unsigned int word = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (unsigned short)((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
#endif
}

NJI_INLINE nji_real nji_widen(nji_f16 value) {
    return nji_f16_to_float(value.bits);
}
NJI_INLINE nji_real nji_widen(nji_bf16 value) {
    return __uint_as_float((unsigned int)value.bits << 16);
}
NJI_INLINE nji_real nji_widen(float value) {
    return value;
}
NJI_INLINE nji_real nji_widen(double value) {
    return (nji_real)value;
}

NJI_INLINE void nji_narrow(nji_real value, nji_f16 *out) {
    out->bits = nji_float_to_f16((float)value);
}
NJI_INLINE void nji_narrow(nji_real value, nji_bf16 *out) {
    out->bits = nji_float_to_bf16((float)value);
}
NJI_INLINE void nji_narrow(nji_real value, float *out) {
    *out = (float)value;
}
NJI_INLINE void nji_narrow(nji_real value, double *out) {
    *out = value;
}

template <typename T> NJI_INLINE void nji_widen_pair(const T *in, nji_real *out) {
    out[0] = nji_widen(in[0]);
    out[1] = nji_widen(in[1]);
}
// One instruction for each half; in lies in registers.
NJI_INLINE void nji_widen_pair(const nji_bf16 *in, nji_real *out) {
    const unsigned int both = *(const unsigned int *)in;
    out[0] = __uint_as_float(both << 16);
    out[1] = __uint_as_float(both & 0xffff0000u);
}

template <typename T> NJI_INLINE void nji_narrow_pair(nji_real low, nji_real high, T *out) {
    nji_narrow(low, out);
    nji_narrow(high, out + 1);
}
#if __CUDA_ARCH__ >= 800
// One instruction for both halves; out lies in registers.
NJI_INLINE void nji_narrow_pair(nji_real low, nji_real high, nji_f16 *out) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(*(unsigned int *)out)
        : "f"((float)high), "f"((float)low));
}
NJI_INLINE void nji_narrow_pair(nji_real low, nji_real high, nji_bf16 *out) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(*(unsigned int *)out)
        : "f"((float)high), "f"((float)low));
}
#endif

// The value as it is now: the compiler will not make it again from what it came from.
NJI_INLINE float nji_pin(float value) {
    float out;
    asm volatile("mov.b32 %0, %1;" : "=f"(out) : "f"(value));
    return out;
}
NJI_INLINE double nji_pin(double value) {
    double out;
    asm volatile("mov.b64 %0, %1;" : "=d"(out) : "d"(value));
    return out;
}

NJI_INLINE unsigned int nji_pin(unsigned int value) {
    unsigned int out;
    asm volatile("mov.b32 %0, %1;" : "=r"(out) : "r"(value));
    return out;
}

// ---- packs: N neighbouring elements, moved in accesses of up to 16 bytes ------------------------

template <int BYTES> struct nji_word;
template <> struct nji_word<2> {
    typedef unsigned short type;
};
template <> struct nji_word<4> {
    typedef unsigned int type;
};
template <> struct nji_word<8> {
    typedef uint2 type;
};
template <> struct nji_word<16> {
    typedef uint4 type;
};

template <typename T, int N> struct nji_pack {
    static const int BYTES = N * (int)sizeof(T);
    static const int STEP = BYTES < 16 ? BYTES : 16;
    typedef typename nji_word<STEP>::type word_type;
    word_type word[BYTES / STEP];

    __device__ __forceinline__ void load(const T *from) {
#pragma unroll
        for (int i = 0; i < BYTES / STEP; i++) word[i] = ((const word_type *)from)[i];
    }
    __device__ __forceinline__ void store(T *to) const {
#pragma unroll
        for (int i = 0; i < BYTES / STEP; i++) ((word_type *)to)[i] = word[i];
    }
    __device__ __forceinline__ void widen(nji_real *out) const {
        if (N == 1) {
            out[0] = nji_widen(*(const T *)word);
        } else {
#pragma unroll
            for (int i = 0; i + 1 < N; i += 2) nji_widen_pair((const T *)word + i, out + i);
        }
    }
    __device__ __forceinline__ void narrow(const nji_real *in) {
        if (N == 1) {
            nji_narrow(in[0], (T *)word);
        } else {
#pragma unroll
            for (int i = 0; i + 1 < N; i += 2) nji_narrow_pair(in[i], in[i + 1], (T *)word + i);
        }
    }
    __device__ __forceinline__ void pin() {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            ((unsigned int *)word)[i] = nji_pin(((unsigned int *)word)[i]);
        }
    }
    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < N; i++) nji_narrow(0, (T *)word + i);
    }
};

// ---- one element of a type known at build time or only at run time ------------------------------

NJI_INLINE nji_real nji_load_any(const void *data, nji_i64 index, int code) {
    switch (code) {
    case NJI_CODE_F16: return nji_widen(((const nji_f16 *)data)[index]);
    case NJI_CODE_BF16: return nji_widen(((const nji_bf16 *)data)[index]);
    case NJI_CODE_F32: return nji_widen(((const float *)data)[index]);
    default: return nji_widen(((const double *)data)[index]);
    }
}

NJI_INLINE void nji_store_any(nji_real value, void *data, nji_i64 index, int code) {
    switch (code) {
    case NJI_CODE_F16: nji_narrow(value, (nji_f16 *)data + index); break;
    case NJI_CODE_BF16: nji_narrow(value, (nji_bf16 *)data + index); break;
    case NJI_CODE_F32: nji_narrow(value, (float *)data + index); break;
    default: nji_narrow(value, (double *)data + index); break;
    }
}

// ---- asking the L2 cache ahead ------------------------------------------------------------------

// Starts the way of `bytes` from memory to the L2 cache; only whole 16-byte pieces (sm_90 and
// later).
NJI_INLINE void nji_fetch(const void *from, int bytes) {
#if __CUDA_ARCH__ >= 900
    const unsigned long long address = (unsigned long long)__cvta_generic_to_global(from);
    const unsigned long long first = (address + 15) / 16 * 16;
    const int whole = (int)(address + bytes - first) / 16 * 16;
    if (whole <= 0) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(whole) : "memory");
#endif
}

// ---- sums over lanes ----------------------------------------------------------------------------

NJI_INLINE nji_real nji_swap(nji_real value, int distance) {
    return __shfl_xor_sync(0xffffffffu, value, distance);
}

// Sum over aligned groups of `lanes` neighbouring threads; equal bits in all of them.
template <int LANES> NJI_INLINE nji_real nji_lanes_sum(nji_real value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += nji_swap(value, distance);
    return value;
}

// Two sums for little more than the price of one: the halves of the group trade, each goes on with
// one of the values. After it the lower half holds the sum of a, the upper half that of b.
template <int LANES> NJI_INLINE nji_real nji_lanes_sum_split(nji_real a, nji_real b) {
    const bool upper = (threadIdx.x & (LANES / 2)) != 0;
    nji_real kept = upper ? b : a;
    kept += nji_swap(upper ? a : b, LANES / 2);
    return nji_lanes_sum<LANES / 2>(kept);
}

// ---- moments --------------------------------------------------------------------------------

NJI_INLINE float nji_rsqrt(float value) {
    return 1.0f / sqrtf(value);
}
NJI_INLINE double nji_rsqrt(double value) {
    return 1.0 / sqrt(value);
}

// The same to one unit in the last place, in few instructions.
NJI_INLINE float nji_quick_rsqrt(float value) {
    float guess;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(guess) : "f"(value));
    const float miss = fmaf(-value * guess, guess, 1.0f); // NaN where value is 0 or infinite
    return miss == miss ? fmaf(0.5f * guess, miss, guess) : guess;
}
NJI_INLINE double nji_quick_rsqrt(double value) {
    return nji_rsqrt(value);
}

// rstd of `count` columns from their sum of squared deviations.
NJI_INLINE nji_real nji_rstd_of(nji_real squares, nji_real count, nji_real eps) {
    nji_real variance = squares / count;
    if (variance < 0) variance = 0; // by rounding; NaN stays
    return nji_quick_rsqrt(variance + eps);
}

// What rounding took from a mean; nothing where the mean is infinite, so that it stays so.
NJI_INLINE nji_real nji_shift_of(nji_real value) {
    return value == value ? value : 0;
}

// ---- copies into shared memory that run on by themselves (sm_80 and later) ----------------------

#if __CUDA_ARCH__ >= 800
// Starts a copy of 4, 8 or 16 bytes, all aligned.
template <int BYTES> NJI_INLINE void nji_copy_async(void *shared, const void *from) {
    const unsigned int to = (unsigned int)__cvta_generic_to_shared(shared);
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else if (BYTES == 8) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
    }
}

// The copies that this thread has started since the last call become a group.
NJI_INLINE void nji_copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the last N groups of this thread are still on their way.
template <int N> NJI_INLINE void nji_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif

// ---- barriers -----------------------------------------------------------------------------------

// Waits for the threads of a team, whole warps of a block.
NJI_INLINE void nji_team_sync(int team, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

#if __CUDA_ARCH__ >= 900
typedef unsigned long long nji_barrier;

NJI_INLINE void nji_barrier_init(nji_barrier *barrier, int arrivals) {
    const unsigned int at = (unsigned int)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

// Makes the initial state known to the cluster; a meeting of its blocks must follow.
NJI_INLINE void nji_barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and tells how many bytes this phase waits for.
NJI_INLINE void nji_barrier_expect(nji_barrier *barrier, int bytes) {
    const unsigned int at = (unsigned int)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
}

NJI_INLINE void nji_barrier_arrive(nji_barrier *barrier) {
    const unsigned int at = (unsigned int)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Starts a copy of whole 16-byte pieces from global memory; the barrier counts its bytes.
NJI_INLINE void nji_copy_bulk(void *shared, const void *from, int bytes, nji_barrier *arrived) {
    const unsigned int to = (unsigned int)__cvta_generic_to_shared(shared);
    const unsigned int bar = (unsigned int)__cvta_generic_to_shared(arrived);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar)
                 : "memory");
}

// Waits for the end of a phase; phases alternate between 0 and 1.
NJI_INLINE void nji_barrier_wait(nji_barrier *barrier, int phase) {
    const unsigned int at = (unsigned int)__cvta_generic_to_shared(barrier);
    unsigned int done;
    do {
        asm volatile("{ .reg .pred p; "
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(phase)
                     : "memory");
    } while (!done);
}

// Address of the same place in another block of the cluster.
NJI_INLINE unsigned int nji_shared_in(const void *shared, int rank) {
    unsigned int here = (unsigned int)__cvta_generic_to_shared(shared), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}
#endif

// ---- clusters (sm_90 and later) -----------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
NJI_INLINE void nji_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the same shared-memory address in another block of the cluster.
NJI_INLINE void nji_cluster_store(nji_real *shared, int rank, nji_real value) {
    const unsigned int there = nji_shared_in(shared, rank);
    if (sizeof(nji_real) == 4) {
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"((float)value) : "memory");
    } else {
        asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"((double)value)
                     : "memory");
    }
}

// Sends two values to the same shared-memory address in another block of the cluster; their bytes
// are counted by the barrier that lies there at `arrived`.
NJI_INLINE void nji_cluster_send(nji_real *shared, nji_real a, nji_real b, nji_barrier *arrived,
                                 int rank) {
    const unsigned int to = nji_shared_in(shared, rank), bar = nji_shared_in(arrived, rank);
    if (sizeof(nji_real) == 4) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
                     "[%0], {%1, %2}, [%3];" ::"r"(to),
                     "f"((float)a), "f"((float)b), "r"(bar)
                     : "memory");
    } else {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 "
                     "[%0], {%1, %2}, [%3];" ::"r"(to),
                     "d"((double)a), "d"((double)b), "r"(bar)
                     : "memory");
    }
}
#endif

// ---- dependent launch (sm_90 and later; nothing where the launch did not ask for it) ------------

// Most kernels begin with this. The next kernel of the stream may take its place on the device as
// soon as all our blocks have one; we ourselves touch no memory until all earlier kernels have
// finished and their writes are seen.
NJI_INLINE void nji_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
