// Where the codes and scales of a head's rows lie, and the loads of those that an invocation holds.
// Includer must include params.glsl and code_units.glsl, define LANES, VECS, IN_FLIGHT, SHARERS and lane(), and two
// views of each buffer: `UNIT key[]` and `uint key_scales[]`, `UNIT value[]` and `uint value_scales[]`.
#ifndef VKATTN_CODE_ROWS
#define VKATTN_CODE_ROWS

const uint QUAD_UNITS = QUAD_VECS / VECS;

// Where the codes of one head lie, in units, and its scales, in words.
struct Source {
    uint units_at, row_units, live_units;
    uint scales_at, row_scales;
};

Source source_of(uint start, uint head_quads, uint batch_quads, uint row_quads, uint vecs) {
    Source source;
    source.units_at = (start + head_quads) * QUAD_UNITS;
    source.row_units = row_quads * QUAD_UNITS;
    source.live_units = (vecs + VECS - 1u) / VECS;
#if defined(KEY_INT8)
    source.row_scales = 2u;
#else
    source.row_scales = (vecs + 15u) / 16u;
#endif
    source.scales_at = 4u * (start + batch_size() * batch_quads) + head_quads / row_quads * source.row_scales;
    return source;
}

// Codes of the keys [j0, j0 + IN_FLIGHT) that this invocation holds, and their scales: of int8 both words of the key
// that it weighs, of blocks the word with the scale of its own block. Beyond the last key, and the last unit of a row,
// those are read again, which costs less than to choose: such keys get no weight, and such units meet queries of 0.
struct Codes {
    UNIT unit[IN_FLIGHT];
    uint scales[IN_FLIGHT];
};

#if defined(KEY_INT8)
#define LOAD_SCALES(words)                                                           \
    uint at = source.scales_at + min(j0 + own_key(), last) * 2u;                     \
    codes.scales[0] = words[at];                                                     \
    codes.scales[1] = words[at + 1u];
#else
#define LOAD_SCALES(words)                                                           \
    [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)                                 \
        codes.scales[u] = words[source.scales_at + min(j0 + u, last) * source.row_scales + own * VECS / 16u];
#endif
#define LOAD(units, words)                                                           \
    Codes codes;                                                                     \
    uint last = end - 1u, own = min(lane(), source.live_units - 1u);                 \
    [[unroll]] for (uint u = 0u; u < IN_FLIGHT; ++u)                                 \
        codes.unit[u] = units[source.units_at + min(j0 + u, last) * source.row_units + own]; \
    LOAD_SCALES(words)                                                               \
    return codes;

// Which of the keys in flight this invocation weighs.
uint own_key() { return lane() / SHARERS; }

Codes load_keys(Source source, uint j0, uint end) { LOAD(key, key_scales) }
Codes load_values(Source source, uint j0, uint end) { LOAD(value, value_scales) }

// The scale of this invocation's own block.
float block_scale(uint scales) { return unpackHalf2x16(scales)[lane() * VECS / 8u & 1u]; }
#endif
