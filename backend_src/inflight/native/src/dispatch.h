// Which version of a kernel runs, and with how many threads.
//
// Every header here is included by files that are compiled for different instruction sets. A plain
// inline function would be merged by the linker into one copy, compiled for any of them: functions
// in headers are therefore `static`, and files named after an instruction set use no templates of
// the standard library.
#pragma once

#include <cstdint>

#define INFLIGHT_API extern "C" __attribute__((visibility("default")))

// A version of a kernel where the compiler has its instruction set, else a null pointer.
#ifdef INFLIGHT_HAVE_AVX2
#define INFLIGHT_IF_AVX2(function) (function)
#else
#define INFLIGHT_IF_AVX2(function) nullptr
#endif
#ifdef INFLIGHT_HAVE_AVX512
#define INFLIGHT_IF_AVX512(function) (function)
#else
#define INFLIGHT_IF_AVX512(function) nullptr
#endif
#ifdef INFLIGHT_HAVE_AMX
#define INFLIGHT_IF_AMX(function) (function)
#else
#define INFLIGHT_IF_AMX(function) nullptr
#endif

namespace inflight {

// The numbers are those of library.py.
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, amx = 3 };

Isa chosen_isa();

// Threads that work together at most, the calling one included (team.h).
int team_size();

// The versions of one kernel in ascending order; null where there is none. Portable always is.
// For files that are compiled for any machine.
template <class Function>
struct Versions {
    Function portable, avx2, avx512, amx;

    Function chosen() const {
        const Isa isa = chosen_isa();
        if (amx && isa >= Isa::amx) return amx;
        if (avx512 && isa >= Isa::avx512) return avx512;
        if (avx2 && isa >= Isa::avx2) return avx2;
        return portable;
    }
};

}  // namespace inflight
