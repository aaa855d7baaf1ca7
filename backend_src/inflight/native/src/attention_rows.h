// Before attention: norm and rope of each token's query and key heads, the query buffer filled, K
// and V stored in their slots.
#pragma once

#include <cmath>

#include "attention.h"
#include "common_vectors.h"

namespace inflight {
namespace {

// Asks for the head of the token after the next as well.
template <class Element>
void load_elements(const Element* from, int64_t row_stride, int64_t size, float* to) {
    constexpr int64_t line = 64 / sizeof(Element);
    for (int64_t i = 0; i < size; i += line) __builtin_prefetch(from + 2 * row_stride + i);
    for (int64_t i = 0; i < size; i += lanes) store(to + i, load(from + i));
}

void load_head(const Heads& heads, bool is_bf16, int64_t token, int64_t head, int64_t size,
               float* to) {
    const int64_t at = token * heads.row_stride + head * heads.head_stride;
    if (is_bf16)
        load_elements(static_cast<const bf16*>(heads.data) + at, heads.row_stride, size, to);
    else
        load_elements(static_cast<const float*>(heads.data) + at, heads.row_stride, size, to);
}

float sum_of_squares(const float* head, int64_t size) {
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += lanes) squares += load(head + i) * load(head + i);
    return sum(squares);
}

// 1 / root mean square over all heads of a token.
float row_factor(const Heads& heads, bool is_bf16, int64_t token, int64_t num_heads, int64_t size,
                 float epsilon) {
    float head_values[max_head_dim], squares = 0.0f;
    for (int64_t head = 0; head < num_heads; ++head) {
        load_head(heads, is_bf16, token, head, size, head_values);
        squares += sum_of_squares(head_values, size);
    }
    return 1.0f / std::sqrt(squares / float(num_heads * size) + epsilon);
}

void scale_by(const float* weight, float factor, float offset, int64_t size, float* head) {
    for (int64_t i = 0; i < size; i += lanes)
        store(head + i, load(head + i) * factor * (load(weight + i) + offset));
}

// Dimension i turns with dimension i + rotary_dim / 2; the rest stays as it is.
void rotate(const float* cos_sin, int64_t rotary_dim, float* head) {
    const int64_t half = rotary_dim / 2;
    const float *cosine = cos_sin, *sine = cos_sin + half;
    float *low = head, *high = head + half;
    int64_t i = 0;
    for (; i + lanes <= half; i += lanes) {
        const f32x16 a = load(low + i), b = load(high + i);
        const f32x16 c = load(cosine + i), s = load(sine + i);
        store(low + i, a * c - b * s);
        store(high + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[i] + a * sine[i];
    }
}

// Reads, norms and turns the query heads, or the key heads, of one token.
class PreparedHeads {
public:
    PreparedHeads(const LayerRules& rules, const RowInputs& in, const Heads& heads,
                  const float* norm, int64_t num_heads, int64_t size, int64_t token)
        : rules_(rules), in_(in), heads_(heads), norm_(norm), size_(size), token_(token) {
        if (norm && rules.norm_spans_heads)
            row_factor_ = row_factor(heads, in.is_bf16, token, num_heads, size, rules.norm_epsilon);
    }

    void read(int64_t head, float* to) const {
        load_head(heads_, in_.is_bf16, token_, head, size_, to);
        if (norm_ && rules_.norm_spans_heads) {
            scale_by(norm_ + head * size_, row_factor_, rules_.norm_offset, size_, to);
        } else if (norm_) {
            const float mean = sum_of_squares(to, size_) / float(size_);
            scale_by(norm_, 1.0f / std::sqrt(mean + rules_.norm_epsilon), rules_.norm_offset, size_,
                     to);
        }
        if (rules_.cos_sin)
            rotate(rules_.cos_sin + in_.positions[token_] * rules_.rotary_dim, rules_.rotary_dim,
                   to);
    }

private:
    const LayerRules& rules_;
    const RowInputs& in_;
    const Heads& heads_;
    const float* norm_;
    int64_t size_, token_;
    float row_factor_ = 0.0f;
};

// Where the K and V of one head go.
template <class Storage>
struct Slot {
    Storage *keys, *values;  // panels
    int64_t offset;          // in the block

    Slot(const KvShape& shape, void* storage, int64_t slot, int64_t head)
        : keys(panel_of<Storage>(shape, storage, slot / shape.tokens_per_block, head, false)),
          values(panel_of<Storage>(shape, storage, slot / shape.tokens_per_block, head, true)),
          offset(slot % shape.tokens_per_block) {}
};

template <class Storage>
void store_kv(const KvShape& shape, const float* key, const float* value,
              const Slot<Storage>& slot) {
    constexpr int64_t pair = pair_size<Storage>;
    const int64_t size = shape.head_dim, per_block = shape.tokens_per_block;
    Storage* values = slot.values + slot.offset / pair * size * pair + slot.offset % pair;
    Storage rounded[max_head_dim];
    for (int64_t i = 0; i < size; i += lanes) store(rounded + i, load(key + i));
    for (int64_t i = 0; i < size; i += pair)
        memcpy(slot.keys + i * per_block + slot.offset * pair, rounded + i,
               pair * sizeof(Storage));
    for (int64_t i = 0; i < size; i += lanes) store(rounded + i, load(value + i));
    for (int64_t i = 0; i < size; ++i) values[i * pair] = rounded[i];
}

// Numbers that fit into bytes.
INFLIGHT_INLINE void store_bytes(int8_t* to, wide_int whole) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i numbers = (__m256i)whole;
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(numbers),
                                           _mm256_extracti128_si256(numbers, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(shorts, shorts));
#else
    for (int lane = 0; lane < wide_lanes; ++lane) to[lane] = int8_t(whole[lane]);
#endif
}

// Rounds to whole multiples of the result, -127 .. 127 of them, halves to even. What is not finite
// makes the result so too. quantize_heads of kv_storage.py takes the same steps.
float quantize(const float* head, int64_t size, int8_t* to) {
    constexpr float to_whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    wide_float largest_lanes = {}, not_finite = {};
    for (int64_t i = 0; i < size; i += wide_lanes) {
        const wide_float x = read<wide_float>(head + i);
        largest_lanes = wide_max(largest_lanes, wide_max(x, -x));
        not_finite += x * 0.0f;  // 0 for numbers, else NaN
    }
    const float scale = (largest(largest_lanes) + sum(not_finite)) / 127.0f;
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < size; i += wide_lanes) {
        // Divided, not multiplied: a product and the sum after it might be rounded as one.
        const wide_float exact = read<wide_float>(head + i) / divisor;
        const wide_float bounded =
            wide_max(wide_splat(-127.0f), wide_min(wide_splat(127.0f), exact));
        const wide_int whole = __builtin_convertvector((bounded + to_whole) - to_whole, wide_int);
        store_bytes(to + i, whole);
    }
    return scale;
}

void store_kv(const KvShape& shape, const float* key, const float* value,
              const Slot<int8_t>& slot) {
    const int64_t size = shape.head_dim, per_block = shape.tokens_per_block;
    int8_t rounded[max_head_dim];
    scales_of(shape, slot.keys)[slot.offset] = quantize(key, size, rounded);
    for (int64_t i = 0; i < size; ++i) slot.keys[i * per_block + slot.offset] = rounded[i];
    scales_of(shape, slot.values)[slot.offset] =
        quantize(value, size, slot.values + slot.offset * size);
}

// Two tokens whose V lies in the same pairs, so that whole vectors are stored.
void store_two(const KvShape& shape, const float (&keys)[2][max_head_dim],
               const float (&values)[2][max_head_dim], const Slot<bf16>& slot) {
    const int64_t size = shape.head_dim;
    bf16* to = slot.values + slot.offset * size;
    for (int64_t i = 0; i < size; i += wide_lanes) {
        const auto rounded = [&](int which) {
            return widened(wide_to_bf16(read<wide_float>(values[which] + i)));
        };
        write(to + 2 * i, rounded(0) | rounded(1) << 16);
    }
    bf16 rounded[2][max_head_dim];
    for (int which = 0; which < 2; ++which)
        for (int64_t i = 0; i < size; i += lanes)
            store(rounded[which] + i, load(keys[which] + i));
    for (int64_t i = 0; i < size; i += 2) {
        const auto pair = [&](int which) { return uint64_t(read<uint32_t>(rounded[which] + i)); };
        write(slot.keys + i * shape.tokens_per_block + slot.offset * 2, pair(0) | pair(1) << 32);
    }
}

// The query, key and value heads of one token.
template <class Query>
class TokenHeads {
public:
    TokenHeads(const KvShape& shape, const LayerRules& rules, const RowInputs& in, int64_t token)
        : in_(in),
          token_(token),
          size_(shape.head_dim),
          group_(rules.num_heads / shape.num_kv_heads),
          queries_(rules, in, in.q, rules.q_norm, rules.num_heads, size_, token),
          keys_(rules, in, in.k, rules.k_norm, shape.num_kv_heads, size_, token) {}

    // Fills the query buffer, and reads what is to be stored.
    void prepare(int64_t kv_head, float* key, float* value) const {
        Query* query = static_cast<Query*>(in_.query) +
                       (kv_head * in_.num_tokens + token_) * group_ * size_;
        for (int64_t g = 0; g < group_; ++g) {
            if constexpr (sizeof(Query) == sizeof(float)) {
                queries_.read(kv_head * group_ + g, query + g * size_);
            } else {
                queries_.read(kv_head * group_ + g, key);
                for (int64_t i = 0; i < size_; i += lanes)
                    store(query + g * size_ + i, load(key + i));
            }
        }
        keys_.read(kv_head, key);
        load_head(in_.v, in_.is_bf16, token_, kv_head, size_, value);
    }

private:
    const RowInputs& in_;
    const int64_t token_, size_, group_;
    const PreparedHeads queries_, keys_;
};

template <class Query, class Storage>
void write_rows(const KvShape& shape, const LayerRules& rules, const RowInputs& in, int64_t begin,
                int64_t end) {
    const int64_t num_kv_heads = shape.num_kv_heads;
    const auto slot_of = [&](int64_t token, int64_t head) {
        return Slot<Storage>(shape, in.storage, in.slots[token], head);
    };
    float keys[2][max_head_dim], values[2][max_head_dim];
    for (int64_t unit = begin; unit < end;) {
        const int64_t token = unit / num_kv_heads;
        const TokenHeads<Query> heads(shape, rules, in, token);
        if constexpr (pair_size<Storage> == 2) {
            const bool has_next = unit % num_kv_heads == 0 && unit + 2 * num_kv_heads <= end;
            const int64_t slot = in.slots[token];
            if (has_next && slot % 2 == 0 && in.slots[token + 1] == slot + 1) {
                const TokenHeads<Query> next(shape, rules, in, token + 1);
                for (int64_t head = 0; head < num_kv_heads; ++head) {
                    heads.prepare(head, keys[0], values[0]);
                    next.prepare(head, keys[1], values[1]);
                    store_two(shape, keys, values, slot_of(token, head));
                }
                unit += 2 * num_kv_heads;
                continue;
            }
        }
        for (; unit < end && unit / num_kv_heads == token; ++unit) {
            const int64_t head = unit % num_kv_heads;
            heads.prepare(head, keys[0], values[0]);
            store_kv(shape, keys[0], values[0], slot_of(token, head));
        }
    }
}

}  // namespace
}  // namespace inflight
