// From tiles of float to y: bias, sum with what is there, gate and up, largest logit. Compiled anew
// for each instruction set.
#pragma once

#include "common_vectors.h"
#include "linear.h"
#include "linear_partial.h"

namespace inflight {
namespace {

constexpr int row_parts = panel_columns / wide_lanes;  // registers of a tile's row

INFLIGHT_INLINE wide_float silu(wide_float x) { return x * wide_reciprocal(1.0f + wide_exp(-x)); }

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + exp(-2 u)).
INFLIGHT_INLINE wide_float gelu_tanh(wide_float x) {
    constexpr float two_root = 1.59576912f;  // 2 sqrt(2 / pi)
    return x * wide_reciprocal(1.0f + wide_exp(-two_root * (x + 0.044715f * x * x * x)));
}

// A panel's biases, zeros where there are none.
struct Bias {
    wide_float parts[row_parts] = {};

    Bias(const Output& output, int64_t panel) {
        if (output.bias) memcpy(parts, output.bias + panel * panel_columns, sizeof parts);
    }
};

// fill(columns) for the columns of a panel in y, `valid` of which are there.
template <class Value, class Fill>
void write_columns(Value* to, int64_t valid, const Fill& fill) {
    if (valid >= panel_columns) return fill(to);
    Value copy[panel_columns] = {};
    memcpy(copy, to, valid * sizeof(Value));
    fill(copy);
    memcpy(to, copy, valid * sizeof(Value));
}

template <bool adds, class Value>
void store_tile(const Output& output, const Place& place, const float* tile) {
    const int64_t column = place.panel * panel_columns, valid = output.columns - column;
    const Bias bias(output, place.panel);
    auto* to = static_cast<Value*>(output.data) + place.first_row * output.columns + column;
    for (int64_t row = 0; row < place.num_rows; ++row, to += output.columns) {
        const float* sums = tile + row * panel_columns;
        write_columns(to, valid, [&](Value* columns) {
            for (int p = 0; p < row_parts; ++p) {
                wide_float value = load_part(sums + p * wide_lanes) + bias.parts[p];
                if (adds) value += load_part(columns + p * wide_lanes);
                store_part(columns + p * wide_lanes, value);
            }
        });
    }
}

template <wide_float activation(wide_float), class Value>
void store_product(const Output& output, const Place& place, const float* tile) {
    const float* up_tile = tile + tile_floats;
    const int64_t column = place.panel / 2 * panel_columns, valid = output.columns - column;
    const Bias gate_bias(output, place.panel), up_bias(output, place.panel + 1);
    auto* to = static_cast<Value*>(output.data) + place.first_row * output.columns + column;
    for (int64_t row = 0; row < place.num_rows; ++row, to += output.columns) {
        const int64_t at = row * panel_columns;
        write_columns(to, valid, [&](Value* columns) {
            for (int p = 0; p < row_parts; ++p) {
                const int64_t part = at + p * wide_lanes;
                const wide_float gate = load_part(tile + part) + gate_bias.parts[p];
                const wide_float up = load_part(up_tile + part) + up_bias.parts[p];
                store_part(columns + p * wide_lanes, activation(gate) * up);
            }
        });
    }
}

// Of equal ones the lowest column wins: a thread meets its panels in ascending order.
void keep_largest(const Output& output, const Place& place, const float* tile) {
    const int64_t first = place.panel * panel_columns, rest = output.columns - first;
    const int64_t valid = rest < panel_columns ? rest : panel_columns;
    const Bias bias(output, place.panel);
    for (int64_t row = 0; row < place.num_rows; ++row) {
        float& best = output.best[place.first_row + row];
        wide_float logits[row_parts], most = wide_splat(best);
        for (int p = 0; p < row_parts; ++p) {
            logits[p] = load_part(tile + row * panel_columns + p * wide_lanes) + bias.parts[p];
            most = wide_max(logits[p], most);
        }
        if (valid == panel_columns && !(largest(most) > best)) continue;
        float values[panel_columns];
        memcpy(values, logits, sizeof values);
        for (int64_t i = 0; i < valid; ++i) {
            if (!(values[i] > best)) continue;
            best = values[i];
            output.best_ids[place.first_row + row] = int32_t(first + i);
        }
    }
}

template <class Value>
void finish_tile_as(const Output& output, const Place& place, const float* tile) {
    switch (output.finish) {
        case Finish::store: return store_tile<false, Value>(output, place, tile);
        case Finish::add: return store_tile<true, Value>(output, place, tile);
        case Finish::silu_mul: return store_product<silu, Value>(output, place, tile);
        case Finish::gelu_tanh_mul: return store_product<gelu_tanh, Value>(output, place, tile);
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
