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
// Formats share their loads, because each is a lot of code in a software device: what a format has none of, or one less
// of, is read again from where something is.
vec4 READ(uint row, uint d) {
    uint format = ROWS_OF.format, at = ROWS_OF.codes_at + row * ROWS_OF.code_words;
    bool is_float = format <= FORMAT_BF16, is_int8 = format == FORMAT_INT8;
    at += format == FORMAT_F32 ? 4u * d : is_float ? 2u * d : format == FORMAT_Q4_0 ? d / 2u : d;
    uvec2 words = uvec2(DATA[at], DATA[is_float ? at + 1u : at]);
    if (format == FORMAT_F32) return from_f32(uvec4(words, DATA[at + 2u], DATA[at + 3u]));
    if (format == FORMAT_F16) return from_f16(words);
    if (format == FORMAT_BF16) return from_bf16(words);
    uint scales_at = ROWS_OF.scales_at + row * ROWS_OF.scale_words + (is_int8 ? 0u : d / 16u);
    uint scale = DATA[scales_at];
    if (is_int8) return int8_vec(words.x, scale, DATA[scales_at + 1u]);
    if (format == FORMAT_Q8_0) return q8_0_vec(words.x, scale, d / 8u);
    return q4_0_vec(words.x, d, scale, d / 8u);
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
