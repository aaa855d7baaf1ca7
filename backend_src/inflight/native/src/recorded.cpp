// Calls that recorded_calls.py has written down, made one after the other. What an iteration saves by
// it is the way from Python to each of them.
#include <cstdint>
#include <cstring>

#include "dispatch.h"

extern "C" {  // elementwise.cpp, linear.cpp, attention.cpp
void inflight_norm(const float* x, const float* weight, const float* bias, void* out, int64_t rows,
                   int64_t width, float epsilon, int64_t is_centered, int64_t target);
void inflight_copy(const float* x, void* out, int64_t rows, int64_t width, int64_t out_is_bf16);
void inflight_activate(void* data, int64_t rows, int64_t width, int64_t activation,
                       int64_t is_bf16);
void inflight_linear(const void* packed, const void* x, int64_t num_rows, void* y, int64_t how);
void inflight_attention_attend(void* attention, const void* rules, const void* qkv,
                               int64_t is_bf16, void* storage, void* out, int64_t out_is_bf16);
}

namespace inflight {
namespace {

// The numbers are those of recorded_calls.py.
enum class Function : int64_t { norm, copy, activate, linear, attend };

// An argument: an address, a whole number, or a float in the first four bytes.
struct Argument {
    int64_t value;

    template <class T>
    operator T*() const { return reinterpret_cast<T*>(value); }
    operator int64_t() const { return value; }
    operator float() const {
        float number;
        memcpy(&number, &value, sizeof number);
        return number;
    }
};

// The arguments are those of the function, in its order.
struct RecordedCall {
    Function function;
    Argument arguments[9];
};

void make(const RecordedCall& call) {
    const Argument* a = call.arguments;
    switch (call.function) {
        case Function::norm:
            return inflight_norm(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
        case Function::copy: return inflight_copy(a[0], a[1], a[2], a[3], a[4]);
        case Function::activate: return inflight_activate(a[0], a[1], a[2], a[3], a[4]);
        case Function::linear: return inflight_linear(a[0], a[1], a[2], a[3], a[4]);
        case Function::attend:
            return inflight_attention_attend(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    }
}

}  // namespace
}  // namespace inflight

using namespace inflight;

INFLIGHT_API void inflight_make_calls(const RecordedCall* calls, int64_t num_calls) {
    for (int64_t i = 0; i < num_calls; ++i) make(calls[i]);
}
