// The body of key_rows.glsl and value_rows.glsl, which define what all capital words below stand for. No guard: it is
// included once for each of them, and takes their definitions back at the end.
//
// Quantised rows: codes lie as [B, Hkv, capacity] rows of whole quads, BASE and the strides are in quads; behind the
// codes of the whole layer lie the scales of its rows, in the same order.
#if defined(KEY_QUANTISED)
#include "formats.glsl"
#include "int8.glsl"
#include "q8_0.glsl"
#include "q4_0.glsl"

#ifndef VKATTN_STORED_ROWS
#define VKATTN_STORED_ROWS
struct StoredRows {
    uint codes_at, code_words, scales_at, scale_words, format;
};
#endif
StoredRows ROWS_OF;

// The number of row 0 of a head. To be called before any row is read: it also notes where the layer lies.
uint PLACE(uint b, uint hk) {
    uint start = 4u * BASE;
    ROWS_OF = StoredRows(start, 4u * STRIDE_ROW, start + 4u * batch_size() * STRIDE_BATCH, scale_words_of(FORMAT, VECS),
                   FORMAT);
    return (b * STRIDE_BATCH + hk * STRIDE_HEAD) / STRIDE_ROW;
}
uint STEP() { return 1u; }

#if defined(KEY_INT8)
vec4 READ(uint row, uint d) {
    uint scale = ROWS_OF.scales_at + 2u * row;
    return int8_vec(DATA[ROWS_OF.codes_at + row * ROWS_OF.code_words + d], DATA[scale], DATA[scale + 1u]);
}
#elif defined(KEY_Q8_0)
vec4 READ(uint row, uint d) {
    uint scales = DATA[ROWS_OF.scales_at + row * ROWS_OF.scale_words + d / 16u];
    return q8_0_vec(DATA[ROWS_OF.codes_at + row * ROWS_OF.code_words + d], scales, d / 8u);
}
#elif defined(KEY_Q4_0)
vec4 READ(uint row, uint d) {
    uint scales = DATA[ROWS_OF.scales_at + row * ROWS_OF.scale_words + d / 16u];
    return q4_0_vec(DATA[ROWS_OF.codes_at + row * ROWS_OF.code_words + d / 2u], d, scales, d / 8u);
}
#else
vec4 READ(uint row, uint d) {
    uint at = ROWS_OF.codes_at + row * ROWS_OF.code_words, scales_at = ROWS_OF.scales_at + row * ROWS_OF.scale_words;
    switch (ROWS_OF.format) {
    case FORMAT_F32:
        at += 4u * d;
        return from_f32(uvec4(DATA[at], DATA[at + 1u], DATA[at + 2u], DATA[at + 3u]));
    case FORMAT_F16: return from_f16(uvec2(DATA[at + 2u * d], DATA[at + 2u * d + 1u]));
    case FORMAT_BF16: return from_bf16(uvec2(DATA[at + 2u * d], DATA[at + 2u * d + 1u]));
    case FORMAT_INT8: return int8_vec(DATA[at + d], DATA[scales_at], DATA[scales_at + 1u]);
    case FORMAT_Q8_0: return q8_0_vec(DATA[at + d], DATA[scales_at + d / 16u], d / 8u);
    default: return q4_0_vec(DATA[at + d / 2u], d, DATA[scales_at + d / 16u], d / 8u);
    }
}
#endif
#else
uint PLACE(uint b, uint hk) { return BASE + b * STRIDE_BATCH + hk * STRIDE_HEAD; }
uint STEP() { return STRIDE_ROW; }
vec4 READ(uint place, uint d) { return key_vec(DATA[place + d]); }
#endif

#undef DATA
#undef BASE
#undef STRIDE_BATCH
#undef STRIDE_HEAD
#undef STRIDE_ROW
#undef VECS
#undef FORMAT
#undef ROWS_OF
#undef PLACE
#undef STEP
#undef READ
