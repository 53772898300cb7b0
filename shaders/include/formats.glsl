// The format of each tensor, for kernels that are not compiled for one: 8 bits each of the params word `formats`.
// Includer must include params.glsl first. The codes are the order of CACHE_DTYPES in vkattn/formats.py.
#ifndef VKATTN_FORMATS
#define VKATTN_FORMATS

const uint FORMAT_F32 = 0u, FORMAT_F16 = 1u, FORMAT_BF16 = 2u, FORMAT_INT8 = 3u, FORMAT_Q8_0 = 4u, FORMAT_Q4_0 = 5u;

uint query_format() { return formats() & 0xFFu; }  // and the output's
uint key_format() { return formats() >> 8 & 0xFFu; }
uint value_format() { return formats() >> 16 & 0xFFu; }
uint new_format() { return formats() >> 24; }  // the rows that are appended

// The words of the codes, or elements, of a row of `vecs` vecs, and those of its scales.
uint code_words_of(uint format, uint vecs) {
    if (format == FORMAT_F32) return 4u * vecs;
    if (format <= FORMAT_BF16) return 4u * ((vecs + 1u) / 2u);
    if (format == FORMAT_INT8) return 4u * ((vecs + 3u) / 4u);
    return (format == FORMAT_Q8_0 ? 8u : 4u) * ((vecs + 7u) / 8u);
}
uint scale_words_of(uint format, uint vecs) {
    if (format <= FORMAT_BF16) return 0u;
    return format == FORMAT_INT8 ? 2u : (vecs + 15u) / 16u;
}
#endif
