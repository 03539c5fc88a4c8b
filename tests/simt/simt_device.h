// CUDA C++ for an ordinary compiler: what the kernels of ptx_src use of it. Included before the program.
//
// The compiler instruments every access to memory as for its thread sanitizer (-fsanitize=thread), whose
// runtime is not linked: the functions it calls are defined here and hand each access to the driver.
// __shared__ variables lie in a section of their own, so that the driver can find, poison and exchange a
// block's shared memory as a whole. PTX arrives as calls: simt_nvrtc.c turns
//     asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value))
// into ptx_cvt_rn_f16_f32(bits, value), so an instruction that is not below does not compile.
#include "simt.h"

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))
// Neither instrumented nor inlined into what is.
#define SIMT_PLAIN static __attribute__((noinline, unused, no_sanitize("thread")))
#define SIMT_CALLED extern "C" __attribute__((noinline, no_sanitize("thread")))

#define __CUDACC_VER_MAJOR__ 13
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __shared__ static __attribute__((section("simt_shared")))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

typedef unsigned int uint2 __attribute__((vector_size(8)));
typedef unsigned int uint4 __attribute__((vector_size(16)));

#ifndef NJI_SLICES
#define NJI_SLICES 1
#endif
#ifndef NJI_CLUSTER
#define NJI_CLUSTER (NJI_SLICES > 1)
#endif

// `extern __shared__ T name[]` arrives as `SIMT_DYNAMIC T name[SIMT_DYNAMIC_COUNT]`: as long as any
// launch may want it, behind what the program declares. The driver keeps to the launch's size.
#define SIMT_DYNAMIC static __attribute__((section("simt_shared_dynamic"), used))
#define SIMT_DYNAMIC_COUNT 232448
__asm__(".section simt_shared, \"aw\"\n.balign 128\n"
        ".section simt_shared_dynamic, \"aw\"\n.balign 128\n.text");

extern "C" char __start_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __start_simt_shared_dynamic[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_simt_shared_dynamic[] __attribute__((weak, visibility("hidden")));
SIMT_EXPORT simt_object simt_this;

// The program's last line.
#define SIMT_OBJECT                                                                                    \
    simt_object simt_this = {__CUDA_ARCH__ / 10,                                                       \
                             sizeof(NJI_X),                                                            \
                             NJI_SLICES,                                                               \
                             NJI_CLUSTER ? NJI_SLICES : 1,                                             \
                             __start_simt_shared,                                                      \
                             __stop_simt_shared,                                                       \
                             __start_simt_shared_dynamic,                                              \
                             __stop_simt_shared_dynamic,                                               \
                             nullptr,                                                                  \
                             nullptr};

// ---- accesses -----------------------------------------------------------------------------------

#define SIMT_ACCESSES(bytes)                                                                           \
    SIMT_CALLED void __tsan_read##bytes(const void *at) {                                              \
        simt_this.host->access(at, bytes, 0);                                                          \
    }                                                                                                  \
    SIMT_CALLED void __tsan_write##bytes(void *at) {                                                   \
        simt_this.host->access(at, bytes, 1);                                                          \
    }                                                                                                  \
    SIMT_CALLED void __tsan_unaligned_read##bytes(const void *at) {                                    \
        simt_this.host->access(at, bytes, 0);                                                          \
    }                                                                                                  \
    SIMT_CALLED void __tsan_unaligned_write##bytes(void *at) {                                         \
        simt_this.host->access(at, bytes, 1);                                                          \
    }
SIMT_ACCESSES(1)
SIMT_ACCESSES(2)
SIMT_ACCESSES(4)
SIMT_ACCESSES(8)
SIMT_ACCESSES(16)

SIMT_CALLED void __tsan_read_range(const void *at, size_t bytes) {
    simt_this.host->access(at, bytes, 0);
}
SIMT_CALLED void __tsan_write_range(void *at, size_t bytes) {
    simt_this.host->access(at, bytes, 1);
}
SIMT_CALLED void __tsan_init() {
}
SIMT_CALLED void __tsan_func_entry(void *) {
}
SIMT_CALLED void __tsan_func_exit() {
}

// ---- threads ------------------------------------------------------------------------------------

// A thread asks again and again and always gets the same: hence const.
__attribute__((const)) SIMT_PLAIN simt_index simt_thread_index() {
    return simt_this.thread->thread;
}
__attribute__((const)) SIMT_PLAIN simt_index simt_block_index() {
    return simt_this.thread->block;
}
__attribute__((const)) SIMT_PLAIN simt_index simt_block_extent() {
    return simt_this.thread->threads;
}
__attribute__((const)) SIMT_PLAIN simt_index simt_grid_extent() {
    return simt_this.thread->blocks;
}
#define threadIdx simt_thread_index()
#define blockIdx simt_block_index()
#define blockDim simt_block_extent()
#define gridDim simt_grid_extent()

SIMT_PLAIN void __syncthreads() {
    simt_this.host->barrier(0, 0, 0);
}
SIMT_PLAIN int __syncthreads_and(int predicate) {
    return simt_this.host->barrier(0, 0, predicate);
}
SIMT_PLAIN void ptx_bar_sync(int number, unsigned threads) {
    simt_this.host->barrier(number, threads, 0);
}
SIMT_PLAIN void __syncwarp(unsigned mask = 0xffffffffu) {
    simt_this.host->warp_barrier(mask);
}

template <typename T> SIMT_PLAIN T simt_exchange(T value, unsigned lane) {
    unsigned long long word = 0;
    static_assert(sizeof value <= sizeof word, "one register or two");
    __builtin_memcpy(&word, &value, sizeof value);
    word = simt_this.host->exchange(word, lane);
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}
template <typename T> SIMT_PLAIN T __shfl_sync(unsigned, T value, int lane) {
    return simt_exchange(value, lane & 31);
}
template <typename T> SIMT_PLAIN T __shfl_xor_sync(unsigned, T value, int mask) {
    const simt_thread *at = simt_this.thread;
    return simt_exchange(value, ((at->thread.x + at->thread.y * at->threads.x) & 31) ^ mask);
}

// ---- arithmetic ---------------------------------------------------------------------------------

// No product melts into a sum here.
#define __fmul_rn(a, b) ((float)(a) * (float)(b))
#define __dmul_rn(a, b) ((double)(a) * (double)(b))

#define sqrtf __builtin_sqrtf
#define fmaf __builtin_fmaf
#define sqrt __builtin_sqrt

static inline unsigned __float_as_uint(float value) {
    unsigned word;
    __builtin_memcpy(&word, &value, sizeof word);
    return word;
}
static inline float __uint_as_float(unsigned word) {
    float value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

SIMT_PLAIN void ptx_mov_b32(float &to, float from) {
    to = from;
}
SIMT_PLAIN void ptx_mov_b32(unsigned &to, unsigned from) {
    to = from;
}
SIMT_PLAIN void ptx_rsqrt_approx_f32(float &to, float from) {
    to = 1 / sqrtf(from);
}
SIMT_PLAIN void ptx_mov_b64(double &to, double from) {
    to = from;
}

SIMT_PLAIN void ptx_cvt_f32_f16(float &to, unsigned short from) {
    const unsigned exponent = from >> 10 & 31, fraction = from & 1023;
    const unsigned sign = (unsigned)(from & 0x8000) << 16;
    if (exponent == 31) {
        to = __uint_as_float(sign | 0x7f800000u | fraction << 13);
    } else if (exponent == 0) { // counts of 2^-24
        to = (sign ? -1.0f : 1.0f) * (float)fraction / 16777216.0f;
    } else {
        to = __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    }
}

// Drops the `bits` lowest bits of word: to the nearest, ties to even.
SIMT_PLAIN unsigned simt_round(unsigned word, int bits) {
    return (word + (1u << (bits - 1)) - 1 + (word >> bits & 1)) >> bits;
}

SIMT_PLAIN void ptx_cvt_rn_f16_f32(unsigned short &to, float from) {
    const unsigned word = __float_as_uint(from), size = word & 0x7fffffffu;
    const unsigned short sign = word >> 16 & 0x8000;
    if (from != from) {
        to = 0x7fff;
    } else if (size >= 0x47800000u) { // 65536 and more; what rounds up to it carries over below
        to = sign | 0x7c00;
    } else if (size >= 0x38800000u) { // 2^-14: normal
        to = sign | (simt_round(size, 13) - (112u << 10));
    } else if (size >= 0x33000000u) { // 2^-25: subnormal
        to = sign | simt_round((size & 0x7fffff) | 0x800000, 126 - (size >> 23));
    } else {
        to = sign;
    }
}

SIMT_PLAIN void ptx_cvt_rn_bf16_f32(unsigned short &to, float from) {
    to = from != from ? 0x7fff : simt_round(__float_as_uint(from), 16);
}

// The first source goes to the upper half.
SIMT_PLAIN void ptx_cvt_rn_f16x2_f32(unsigned &to, float upper, float lower) {
    unsigned short half[2];
    ptx_cvt_rn_f16_f32(half[0], lower);
    ptx_cvt_rn_f16_f32(half[1], upper);
    to = (unsigned)half[1] << 16 | half[0];
}
SIMT_PLAIN void ptx_cvt_rn_bf16x2_f32(unsigned &to, float upper, float lower) {
    unsigned short half[2];
    ptx_cvt_rn_bf16_f32(half[0], lower);
    ptx_cvt_rn_bf16_f32(half[1], upper);
    to = (unsigned)half[1] << 16 | half[0];
}

// ---- addresses ----------------------------------------------------------------------------------

SIMT_PLAIN size_t __cvta_generic_to_shared(const void *address) {
    return simt_this.host->shared_address(address);
}
SIMT_PLAIN size_t __cvta_generic_to_global(const void *address) {
    return (size_t)address;
}

// What "l" takes: a pointer or an integer.
struct simt_global {
    void *at;
    template <typename T> simt_global(T from) : at((void *)from) {
    }
};

// ---- loads and copies ---------------------------------------------------------------------------

template <typename T> SIMT_PLAIN T __ldcg(const T *from) {
    simt_this.host->access(from, sizeof *from, 0);
    return *from;
}

#if __CUDA_ARCH__ >= 800
SIMT_PLAIN void ptx_cp_async_ca_shared_global(unsigned to, simt_global from, int bytes, int filled) {
    simt_this.host->copy(to, from.at, bytes == 4 || bytes == 8 || bytes == 16 ? bytes : 0, filled);
}
SIMT_PLAIN void ptx_cp_async_ca_shared_global(unsigned to, simt_global from, int bytes) {
    ptx_cp_async_ca_shared_global(to, from, bytes, bytes);
}
SIMT_PLAIN void ptx_cp_async_cg_shared_global(unsigned to, simt_global from, int bytes, int filled) {
    simt_this.host->copy(to, from.at, bytes == 16 ? bytes : 0, filled);
}
SIMT_PLAIN void ptx_cp_async_cg_shared_global(unsigned to, simt_global from, int bytes) {
    ptx_cp_async_cg_shared_global(to, from, bytes, bytes);
}
SIMT_PLAIN void ptx_cp_async_commit_group() {
    simt_this.host->commit_copies();
}
SIMT_PLAIN void ptx_cp_async_wait_group(int groups) {
    simt_this.host->wait_for_copies(groups);
}
SIMT_PLAIN void ptx_cp_async_wait_all() {
    simt_this.host->wait_for_copies(-1);
}
#endif

// ---- barriers in shared memory, and what they count ---------------------------------------------

#if __CUDA_ARCH__ >= 900
typedef bool simt_reg_pred;

SIMT_PLAIN void ptx_selp_u32(unsigned &to, unsigned a, unsigned b, bool first) {
    to = first ? a : b;
}

SIMT_PLAIN void ptx_mbarrier_init_shared__cta_b64(unsigned at, int arrivals) {
    simt_this.host->barrier_init(at, arrivals);
}
SIMT_PLAIN void ptx_fence_mbarrier_init_release_cluster() {
    simt_this.host->barrier_fence();
}
SIMT_PLAIN void ptx_mbarrier_arrive_shared__cta_b64(unsigned at) {
    simt_this.host->barrier_arrive(at, 0);
}
SIMT_PLAIN void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(unsigned at, int bytes) {
    simt_this.host->barrier_arrive(at, bytes);
}
// It may wait as long as it likes: here, until the phase has ended.
SIMT_PLAIN void ptx_mbarrier_try_wait_parity_shared__cta_b64(bool &done, unsigned at,
                                                             unsigned parity) {
    simt_this.host->barrier_wait(at, parity);
    done = true;
}

SIMT_PLAIN void
ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(unsigned to, simt_global from,
                                                                      int bytes, unsigned barrier) {
    simt_this.host->copy_bulk(to, from.at, bytes, barrier);
}
SIMT_PLAIN void
ptx_st_async_weak_shared__cluster_mbarrier__complete_tx__bytes_v2_f32(unsigned to, float a, float b,
                                                                      unsigned barrier) {
    const float value[2] = {a, b};
    simt_this.host->send(to, value, sizeof value, barrier);
}
SIMT_PLAIN void
ptx_st_async_weak_shared__cluster_mbarrier__complete_tx__bytes_v2_f64(unsigned to, double a,
                                                                      double b, unsigned barrier) {
    const double value[2] = {a, b};
    simt_this.host->send(to, value, sizeof value, barrier);
}
#endif

// ---- clusters, dependent launch, prefetch -------------------------------------------------------

SIMT_PLAIN void ptx_barrier_cluster_arrive_release_aligned() {
    simt_this.host->cluster_arrive();
}
SIMT_PLAIN void ptx_barrier_cluster_wait_acquire_aligned() {
    simt_this.host->cluster_wait();
}

SIMT_PLAIN void ptx_mapa_shared__cluster_u32(unsigned &there, unsigned here, int rank) {
    there = (here & ((1u << SIMT_RANK_SHIFT) - 1)) | (unsigned)rank << SIMT_RANK_SHIFT;
}
SIMT_PLAIN void ptx_st_shared__cluster_f32(unsigned address, float value) {
    simt_this.host->store_cluster(address, &value, sizeof value);
}
SIMT_PLAIN void ptx_st_shared__cluster_f64(unsigned address, double value) {
    simt_this.host->store_cluster(address, &value, sizeof value);
}

SIMT_PLAIN void ptx_griddepcontrol_launch_dependents() {
}
SIMT_PLAIN void ptx_griddepcontrol_wait() {
    simt_this.host->wait_for_earlier_kernels();
}

SIMT_PLAIN void ptx_cp_async_bulk_prefetch_L2_global(unsigned long long address, int bytes) {
    simt_this.host->prefetch(address, bytes);
}
