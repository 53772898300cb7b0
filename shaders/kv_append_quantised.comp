// Purpose   cache update: quantises q_len new rows of keys and of values into a cache at input_pos(b), those rows only
// Maths     vkattn.oracle.quantize. int8, a row: scale = max((hi - lo) / 255, 2^-23), code = clamp(round(x / scale +
//           zp)); q8_0, 32 elements: scale = half(max |x| / 127); q4_0: scale = half(m / -8), m of the largest
//           magnitude; code = clamp(round(x / scale)). Rounded to the nearest even, after divisions that round as
//           NumPy's (include/divide.glsl): codes and scales are the oracle's on any device
// Bindings  0 params  1 new_key [B, Hkv, L, D]  2 new_value [B, Hkv, L, Ev], of any float dtype  3 key_cache
//           4 value_cache: per layer the codes of [B, Hkv, capacity] rows, then their scales (vkattn/formats.py)
// Grid      any number of workgroups of 64; each takes one row after another, keys first, a vec to an invocation
// Push      params_base (words); new_key_base, new_value_base (vecs); key_base, value_base (quads)
// Bounds    the host has checked that every input_pos(b) + q_len is within capacity. What pads a row decodes to 0. Rows
//           share no word. A row (int8) or block that holds an infinity or a NaN gets the scale NaN and codes of 0; a
//           scale beyond float16's range stays at 65504
// Requires  nothing beyond Vulkan 1.1
// Source    ExecuTorch's quantised KV cache (choose_qparams_per_token_asymmetric); the block formats of GGML
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 64) in;
const uint THREADS = 64u;
layout(push_constant) uniform Push {
    uint params_base;
    uint new_key_base;
    uint new_value_base;
    uint key_base;
    uint value_base;
} push;

#include "elements.glsl"
#include "params.glsl"
#include "formats.glsl"
#include "divide.glsl"
layout(set = 0, binding = 1) restrict readonly buffer NewKey { uint new_key[]; };
layout(set = 0, binding = 2) restrict readonly buffer NewValue { uint new_value[]; };
layout(set = 0, binding = 3) coherent writeonly buffer KeyCache { uint key_cache[]; };
layout(set = 0, binding = 4) coherent writeonly buffer ValueCache { uint value_cache[]; };

const uint INFINITY = 0x7F800000u, NOT_A_NUMBER = 0x7FC00000u, HALF_NOT_A_NUMBER = 0x7E00u;
const float SMALLEST_SCALE = 1.1920929e-7;  // 2^-23: upstream's least scale
const float LARGEST_SCALE = 65504.0;
const uint BLOCK_VECS = 8u;

shared vec2 extremes[THREADS];  // (least, greatest); greatest is infinity if something is not finite
shared float peaks[THREADS];    // the element of the largest magnitude of each vec; infinity as above
shared uint nibbles[THREADS];
shared uint halves[THREADS / BLOCK_VECS];  // the scale of each block

// One new row: where it comes from (vecs), and where its codes and scales go (words).
struct Row {
    bool is_key;
    uint from, vecs;
    uint codes_at, code_words, scales_at;
    uint format;
};

Row row_at(bool is_key, uint index) {
    uint b = index / (num_kv_heads() * q_len()), h = index / q_len() % num_kv_heads(), i = index % q_len();
    uint token = input_pos(b) + i;
    Row row;
    row.is_key = is_key;
    uint batch_quads, row_quads, start;
    if (is_key) {
        row.from = push.new_key_base + b * new_k_stride_batch() + h * new_k_stride_head() + i * new_k_stride_row();
        row.vecs = head_vecs();
        row.format = key_format();
        batch_quads = k_stride_batch();
        row_quads = k_stride_row();
        start = push.key_base + key_offset();
        row.codes_at = 4u * (start + b * batch_quads + h * k_stride_head() + token * row_quads);
    } else {
        row.from = push.new_value_base + b * new_v_stride_batch() + h * new_v_stride_head() + i * new_v_stride_row();
        row.vecs = value_vecs();
        row.format = value_format();
        batch_quads = v_stride_batch();
        row_quads = v_stride_row();
        start = push.value_base + value_offset();
        row.codes_at = 4u * (start + b * batch_quads + h * v_stride_head() + token * row_quads);
    }
    row.code_words = 4u * row_quads;
    uint number = (row.codes_at - 4u * start) / row.code_words;
    row.scales_at = 4u * (start + batch_size() * batch_quads) + number * scale_words_of(row.format, row.vecs);
    return row;
}

uint source_word(bool is_key, uint at) { return is_key ? new_key[at] : new_value[at]; }

// Vec e of a new row, 0 beyond it.
vec4 source(Row row, uint e) {
    if (e >= row.vecs) return vec4(0.0);
    uint at = row.from + e, format = new_format();
    if (format == FORMAT_F32) {
        at *= 4u;
        return from_f32(uvec4(source_word(row.is_key, at), source_word(row.is_key, at + 1u),
                              source_word(row.is_key, at + 2u), source_word(row.is_key, at + 3u)));
    }
    uvec2 words = uvec2(source_word(row.is_key, 2u * at), source_word(row.is_key, 2u * at + 1u));
    if (format == FORMAT_F16) return from_f16(words);
    return from_bf16(words);
}

void store(bool is_key, uint at, uint word) {
    if (is_key) key_cache[at] = word;
    else value_cache[at] = word;
}

bool not_finite(vec4 x) { return any(equal(floatBitsToUint(x) & INFINITY, uvec4(INFINITY))); }

uint four_bytes(vec4 codes) {
    uvec4 bytes = uvec4(codes);
    return bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24;
}

void append_floats(Row row) {
    uint vec_words = row.format == FORMAT_F32 ? 4u : 2u;
    for (uint e = gl_LocalInvocationIndex; e * vec_words < row.code_words; e += THREADS) {
        vec4 x = source(row, e);
        uint at = row.codes_at + e * vec_words;
        uvec4 words = to_f32(x);
        if (row.format == FORMAT_F16) words.xy = to_f16(x);
        if (row.format == FORMAT_BF16) words.xy = to_bf16(x);
        for (uint i = 0u; i < vec_words; ++i) store(row.is_key, at + i, words[i]);
    }
}

void append_int8(Row row) {
    uint lane = gl_LocalInvocationIndex;
    vec2 own = vec2(0.0);
    for (uint e = lane; e < row.vecs; e += THREADS) {
        vec4 x = source(row, e);
        if (not_finite(x)) own.y = uintBitsToFloat(INFINITY);
        else own = vec2(min(own.x, min(min(x.x, x.y), min(x.z, x.w))), max(own.y, max(max(x.x, x.y), max(x.z, x.w))));
    }
    extremes[lane] = own;
    for (uint step = THREADS / 2u; step > 0u; step /= 2u) {
        barrier();
        if (lane < step) {
            vec2 other = extremes[lane + step], mine = extremes[lane];
            extremes[lane] = vec2(min(mine.x, other.x), max(mine.y, other.y));
        }
    }
    barrier();
    vec2 range = extremes[0];
    barrier();
    bool broken = floatBitsToUint(range.y) == INFINITY;
    if (broken) range = vec2(0.0);
    float scale = max(divide(range.y - range.x, 255.0), SMALLEST_SCALE);
    float from_low = divide(range.x, scale);
    float from_high = divide(range.y, scale);
    precise float error_of_both = (from_low - 128.0) + (from_high + 127.0);
    precise float exact = error_of_both > 0.0 ? -128.0 - from_low : 127.0 - from_high;
    float zero_point = broken ? 0.0 : roundEven(clamp(exact, -128.0, 127.0));
    for (uint e = lane; e < row.code_words; e += THREADS) {
        precise vec4 place = divide(source(row, e), scale) + zero_point;
        vec4 code = broken ? vec4(0.0) : clamp(roundEven(place), -128.0, 127.0);
        store(row.is_key, row.codes_at + e, four_bytes(code + 128.0));
    }
    if (lane == 0u) {
        store(row.is_key, row.scales_at, broken ? NOT_A_NUMBER : floatBitsToUint(scale));
        store(row.is_key, row.scales_at + 1u, uint(int(zero_point)));
    }
}

// The element of the largest magnitude, the first if there are several; infinity if one is not finite.
float peak_of(vec4 x) {
    if (not_finite(x)) return uintBitsToFloat(INFINITY);
    float peak = x.x;
    [[unroll]] for (uint i = 1u; i < 4u; ++i) peak = abs(x[i]) > abs(peak) ? x[i] : peak;
    return peak;
}

void append_blocks(Row row) {
    uint lane = gl_LocalInvocationIndex, in_block = lane % BLOCK_VECS, block = lane / BLOCK_VECS;
    bool eight = row.format == FORMAT_Q8_0;
    uint row_vecs = eight ? row.code_words : 2u * row.code_words;
    for (uint e0 = 0u; e0 < row_vecs; e0 += THREADS) {
        uint e = e0 + lane;
        vec4 x = source(row, e);
        peaks[lane] = peak_of(x);
        barrier();
        float peak = peaks[block * BLOCK_VECS];
        for (uint i = 1u; i < BLOCK_VECS; ++i) {
            float other = peaks[block * BLOCK_VECS + i];
            if (abs(other) > abs(peak)) peak = other;
        }
        bool broken = (floatBitsToUint(peak) & INFINITY) == INFINITY;
        float exact = eight ? divide(abs(peak), 127.0) : peak / -8.0;
        uint bits = half_bits(broken ? 0.0 : clamp(exact, -LARGEST_SCALE, LARGEST_SCALE));
        bits = (bits & 0x7FFFu) == 0u ? 0u : bits;  // 0 has no sign: a device may flush what is below normal numbers
        float scale = unpackHalf2x16(bits).x;
        vec4 code = scale == 0.0 ? vec4(0.0) : roundEven(divide(x, scale));
        code = eight ? clamp(code, -127.0, 127.0) + 128.0 : clamp(code, -8.0, 7.0) + 8.0;
        if (eight && e < row_vecs) store(row.is_key, row.codes_at + e, four_bytes(code));
        nibbles[lane] = four_bytes(code);
        if (in_block == 0u) halves[block] = broken ? HALF_NOT_A_NUMBER : bits;
        barrier();
        if (!eight && lane % 2u == 0u && e < row_vecs)
            store(row.is_key, row.codes_at + e / 2u, nibbles[lane] | nibbles[lane + 1u] << 4);
        if (lane % (2u * BLOCK_VECS) == 0u && e < row_vecs)
            store(row.is_key, row.scales_at + e / (2u * BLOCK_VECS), halves[block] | halves[block + 1u] << 16);
    }
}

void main() {
    uint rows = batch_size() * num_kv_heads() * q_len();
    for (uint index = gl_WorkGroupID.x; index < 2u * rows; index += gl_NumWorkGroups.x) {
        bool is_key = index < rows;
        Row row = row_at(is_key, is_key ? index : index - rows);
        if (row.format == FORMAT_INT8) append_int8(row);
        else if (row.format <= FORMAT_BF16) append_floats(row);
        else append_blocks(row);
    }
}
