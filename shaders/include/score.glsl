// From a dot product to a masked score: scale, then softcap, then ALiBi and the mask, then visibility.
// Includer must include params.glsl and tiles.glsl, and define the mask buffer as `uint mask_data[]`.
#ifndef VKATTN_SCORE
#define VKATTN_SCORE

const uint MINUS_INFINITY = 0xFF800000u;

uint mask_index(uint b, uint h, uint token, uint key) {
    return b * mask_stride_batch() + h * mask_stride_head() + token * mask_stride_row() + key * mask_stride_col();
}

// Whether the mask alone lets this element through (a float mask closes it with minus infinity only).
bool mask_open(uint b, uint h, uint token, uint key) {
    uint index = mask_index(b, h, token, key);
    if ((flags() & FLAG_MASK_BITS) != 0u) return (mask_data[push.mask_base + (index >> 5)] >> (index & 31u) & 1u) != 0u;
    if ((flags() & FLAG_MASK_FLOAT) != 0u) return mask_data[push.mask_base + index] != MINUS_INFINITY;
    return true;
}

bool visible(uint b, uint h, uint token, uint key) {
    return key >= key_begin(b, token) && key < key_end(b, token) && mask_open(b, h, token, key);
}

// The score of one element, or minus infinity where it is masked; `dot_product` is not used then (it may be NaN).
float masked_score(float dot_product, uint b, uint h, uint token, uint key) {
    if (!visible(b, h, token, key)) return uintBitsToFloat(MINUS_INFINITY);
    float s = dot_product * scale();
    float cap = softcap();
    if (cap > 0.0) s = cap * tanh(clamp(s / cap, -20.0, 20.0));  // tanh(20) is 1 in float32; larger may overflow
    if ((flags() & FLAG_ALIBI) != 0u) s -= alibi_slope(h) * abs(float(q_offset(b) + int(token) - int(key)));
    if ((flags() & FLAG_MASK_FLOAT) != 0u) s += uintBitsToFloat(mask_data[push.mask_base + mask_index(b, h, token, key)]);
    return s;
}
#endif
