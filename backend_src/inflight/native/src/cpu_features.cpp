// What this CPU and this system can run, and the choice that was made of it.
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace inflight {
namespace {

#if defined(__x86_64__)

struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // zeros where there is no such leaf
    return r;
}

bool has(unsigned word, int bit) { return (word >> bit) & 1; }

// The register states that the operating system saves on a switch of threads.
uint64_t saved_states() {
    if (!has(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

bool saves(uint64_t mask) { return (saved_states() & mask) == mask; }

bool can_avx2() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    return saves(0x6) && has(one.c, 12) /* FMA */ && has(one.c, 29) /* F16C */ &&
           has(seven.b, 5) /* AVX2 */ && has(seven.b, 8) /* BMI2 */;
}

bool can_avx512() {
    const Registers seven = cpuid(7, 0), more = cpuid(7, 1);
    return can_avx2() && saves(0xe6) && has(seven.b, 16) /* F */ && has(seven.b, 17) /* DQ */ &&
           has(seven.b, 30) /* BW */ && has(seven.b, 31) /* VL */ && has(seven.c, 11) /* VNNI */ &&
           has(more.a, 5) /* BF16 */;
}

// Linux hands out the tile registers on request, to the process and its later threads.
bool may_use_tiles() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool can_amx() {
    const Registers seven = cpuid(7, 0);
    return can_avx512() && saves(0x60000) && has(seven.d, 22) /* BF16 */ &&
           has(seven.d, 24) /* TILE */ && has(seven.d, 25) /* INT8 */ && may_use_tiles();
}

#else

bool can_avx2() { return false; }
bool can_avx512() { return false; }
bool can_amx() { return false; }

#endif

#ifdef INFLIGHT_HAVE_AVX2
constexpr bool compiled_avx2 = true;
#else
constexpr bool compiled_avx2 = false;
#endif
#ifdef INFLIGHT_HAVE_AVX512
constexpr bool compiled_avx512 = true;
#else
constexpr bool compiled_avx512 = false;
#endif
#ifdef INFLIGHT_HAVE_AMX
constexpr bool compiled_amx = true;
#else
constexpr bool compiled_amx = false;
#endif

Isa find_best_isa() {
    if (compiled_amx && can_amx()) return Isa::amx;
    if (compiled_avx512 && can_avx512()) return Isa::avx512;
    if (compiled_avx2 && can_avx2()) return Isa::avx2;
    return Isa::portable;
}

const Isa best = find_best_isa();
std::atomic<Isa> chosen{best};
std::atomic<int> num_threads{omp_get_max_threads()};

}  // namespace

Isa chosen_isa() { return chosen.load(std::memory_order_relaxed); }

int team_size() { return num_threads.load(std::memory_order_relaxed); }

}  // namespace inflight

INFLIGHT_API int64_t inflight_best_isa() { return int64_t(inflight::best); }

INFLIGHT_API int64_t inflight_isa() { return int64_t(inflight::chosen_isa()); }

// Returns what was chosen before. More than the best is the best.
INFLIGHT_API int64_t inflight_set_isa(int64_t isa) {
    const int64_t wanted = std::clamp<int64_t>(isa, 0, int64_t(inflight::best));
    return int64_t(inflight::chosen.exchange(inflight::Isa(wanted)));
}

INFLIGHT_API void inflight_set_num_threads(int64_t count) {
    inflight::num_threads.store(int(std::max<int64_t>(count, 1)));
}
