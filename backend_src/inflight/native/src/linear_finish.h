// From tiles of float to y: bias, sum with what is there, gate and up, largest logit. Compiled anew
// for each instruction set.
#pragma once

#include "common_vectors.h"
#include "linear.h"
#include "linear_partial.h"

namespace inflight {
namespace {

f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + exp(-2 u)).
f32x16 gelu_tanh(f32x16 x) {
    constexpr float two_root = 1.59576912f;  // 2 sqrt(2 / pi)
    return x / (1.0f + exp(-two_root * (x + 0.044715f * x * x * x)));
}

f32x16 bias_at(const float* bias, int64_t column) {
    return bias ? load(bias + column) : f32x16{};
}

template <bool adds, class Number>
void store_tile(const Output& output, const Place& place, const float* tile) {
    const int64_t first = place.panel * panel_columns;
    for (int64_t part = 0; part < panel_columns; part += lanes) {
        const int64_t column = first + part;
        const f32x16 bias = bias_at(output.bias, column);
        auto* to = static_cast<Number*>(output.data) + place.first_row * output.columns + column;
        for (int64_t row = 0; row < place.num_rows; ++row, to += output.columns) {
            f32x16 value = load(tile + row * panel_columns + part) + bias;
            if (adds) value += load_up_to(to, output.columns - column);
            store_up_to(to, value, output.columns - column);
        }
    }
}

template <f32x16 activation(f32x16), class Number>
void store_product(const Output& output, const Place& place, const float* tile) {
    const float* up_tile = tile + place.num_rows * panel_columns;
    const int64_t first = place.panel / 2 * panel_columns;
    for (int64_t part = 0; part < panel_columns; part += lanes) {
        const int64_t column = first + part;
        const f32x16 gate_bias = bias_at(output.bias, 2 * first + part);
        const f32x16 up_bias = bias_at(output.bias, 2 * first + panel_columns + part);
        auto* to = static_cast<Number*>(output.data) + place.first_row * output.columns + column;
        for (int64_t row = 0; row < place.num_rows; ++row, to += output.columns) {
            const int64_t at = row * panel_columns + part;
            const f32x16 gate = load(tile + at) + gate_bias, up = load(up_tile + at) + up_bias;
            store_up_to(to, activation(gate) * up, output.columns - column);
        }
    }
}

// Of equal ones the lowest column wins: a thread meets its panels in ascending order.
void keep_largest(const Output& output, const Place& place, const float* tile) {
    const int64_t first = place.panel * panel_columns;
    const int64_t rest = output.columns - first;
    const int64_t valid = rest < panel_columns ? rest : panel_columns;
    for (int64_t row = 0; row < place.num_rows; ++row) {
        float& best = output.best[place.first_row + row];
        for (int64_t i = 0; i < valid; ++i) {
            const float bias = output.bias ? output.bias[first + i] : 0.0f;
            const float value = tile[row * panel_columns + i] + bias;
            if (value > best) {
                best = value;
                output.best_ids[place.first_row + row] = int32_t(first + i);
            }
        }
    }
}

template <class Number>
void finish_tile_as(const Output& output, const Place& place, const float* tile) {
    switch (output.finish) {
        case Finish::store: return store_tile<false, Number>(output, place, tile);
        case Finish::add: return store_tile<true, Number>(output, place, tile);
        case Finish::silu_mul: return store_product<silu, Number>(output, place, tile);
        case Finish::gelu_tanh_mul: return store_product<gelu_tanh, Number>(output, place, tile);
        case Finish::argmax: return keep_largest(output, place, tile);
    }
}

void finish_tile(const Output& output, const Place& place, const float* tile) {
    if (output.number == Number::f32)
        finish_tile_as<float>(output, place, tile);
    else
        finish_tile_as<bf16>(output, place, tile);
}

}  // namespace
}  // namespace inflight
