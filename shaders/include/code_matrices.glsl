// Codes as operands: each invocation loads the codes that its components of a matrix are made of, and turns them into
// halves in registers.
//
// A half has 11 bits, so that `code | 0x6400` in 16 bits is 1024 + code, exactly, and a subtraction leaves the code
// less its bias: two operations for two elements. Which element of a key is which column of a matrix does not matter if
// the queries lie the same way, nor which element of a value is which row if the outputs are put in order at the end;
// so an invocation takes words as they are stored. Of blocks with a scale of their own a matrix holds one only.
// Includer must include params.glsl and lane_matrices.glsl, define KEY_INT8, KEY_Q8_0 or KEY_Q4_0, WIDTH, and views of
// the buffers: `KEY_UNIT key[]`, `VALUE_UNIT value[]`, `uvec2 key_scales[]` and `uvec2 value_scales[]`.
#ifndef VKATTN_CODE_MATRICES
#define VKATTN_CODE_MATRICES

#define STEPS (WIDTH / 16)  // matrices across head_dim and value_dim
#define WORDS (WIDTH / 32)  // of a value in an invocation: each is of two matrices
#if !defined(KEY_INT8)
#define BLOCKS (WIDTH / 32)  // with a scale of their own
#define WEIGHTS BLOCKS
#else
#define WEIGHTS 1
#endif

// Where the codes of one head lie, in quads, and its scales, in words.
struct Source {
    uint codes_at, row_quads;
    uint live;  // quads, or blocks, of a row
    uint scales_at, row_scales;
};

Source source_of(uint start, uint head_quads, uint batch_quads, uint row_quads, uint vecs) {
    Source source;
    source.codes_at = start + head_quads;
    source.row_quads = row_quads;
#if defined(BLOCKS)
    source.live = FULL ? BLOCKS : (vecs + 7u) / 8u;
    source.row_scales = FULL ? (BLOCKS + 1u) / 2u : (vecs + 15u) / 16u;
#else
    source.live = FULL ? WIDTH / 16u : row_quads;
    source.row_scales = 2u;
#endif
    source.scales_at = 4u * (start + batch_size() * batch_quads) + head_quads / row_quads * source.row_scales;
    return source;
}

// What an invocation holds of a tile of 16 keys: its share of keys g and g + 8, and their scales (int8: scale and zero
// point). Beyond the last key, and the last unit of a row, those are read again: such keys get no weight, and such
// elements meet queries of 0. Of the values it holds its share of values t, t + 8, t + 4 and t + 12, and the scales
// of values g and g + 8.
struct Keys {
    KEY_UNIT unit[2 * KEY_UNITS];
    uvec2 scale[2];
    bool is_second[2];
};
struct Values {
    VALUE_UNIT unit[4 * VALUE_UNITS];
    uvec2 scale[2];
    bool is_second[2];
};

// The scales of row j: a pair of words, and whether the first of them is the pair's second. That one is chosen where
// scales are used: what is done with loaded numbers right away waits for them, and the loads were for the next tile.
#define SCALE_WORD(source, j) (source.scales_at + (j) * source.row_scales)
#if defined(KEY_INT8)
#define IS_SECOND(source, j) false
#else
#define IS_SECOND(source, j) (!(FULL && BLOCKS == 4) && (SCALE_WORD(source, j) & 1u) != 0u)
#endif
#define SCALES_OF(held, h) uvec2(held.is_second[h] ? held.scale[h].y : held.scale[h].x, held.scale[h].y)

#if defined(KEY_INT8)
#define KEY_AT(j, n) (source.codes_at + (j) * source.row_quads + unit_of_row(4u * (n) + t(), source.live))
#if WIDTH == 128
#define VALUE_AT(j, n) (source.codes_at + (j) * source.row_quads + unit_of_row(g(), source.live))
#else
#define VALUE_AT(j, n) (4u * (source.codes_at + (j) * source.row_quads) + unit_of_row(8u * (n) + g(), 4u * source.live))
#endif
#else
#define KEY_AT(j, n) ((source.codes_at + (j) * source.row_quads) * (16u / KEY_UNIT_BYTES)  \
                      + 4u * unit_of_row(n, source.live) + t())
#define VALUE_AT(j, n) (4u * (source.codes_at + (j) * source.row_quads)                    \
                        + BLOCK_WORDS * unit_of_row(n, source.live) + g() * BLOCK_WORDS / 8u)
#endif

// Beyond the last unit of a row, that one.
uint unit_of_row(uint n, uint live) { return FULL ? n : min(n, live - 1u); }

#if defined(BLOCKS)
KEY_UNIT key_unit(Source source, uint j, uint n) {
    uint at = KEY_AT(j, FULL ? 0u : n);
    if (!FULL) return key[at];
    return n == 0u ? key[at] : n == 1u ? key_1[at] : n == 2u ? key_2[at] : key_3[at];
}
VALUE_UNIT value_unit(Source source, uint j, uint n) {
    uint at = VALUE_AT(j, FULL ? 0u : n);
    if (!FULL) return value[at];
    return n == 0u ? value[at] : n == 1u ? value_1[at] : n == 2u ? value_2[at] : value_3[at];
}
#else
KEY_UNIT key_unit(Source source, uint j, uint n) { return key[KEY_AT(j, n)]; }
VALUE_UNIT value_unit(Source source, uint j, uint n) { return value[VALUE_AT(j, n)]; }
#endif

// Rows of a tile whose codes or scales an invocation holds; beyond the last key, that one.
uint key_row(uint j0, uint h, uint end) { return min(j0 + 8u * h + g(), end - 1u); }
uint value_row(uint j0, uint i, uint end) { return min(j0 + t() + 4u * (i / 2u) + 8u * (i % 2u), end - 1u); }

// Of the tile at j0, where k_source, v_source and end are known: units n of k and v; scales; all of it.
#define FETCH_KEY_UNITS(n, j0)              \
    UNROLL for (uint h = 0u; h < 2u; ++h)   \
        k.unit[h * KEY_UNITS + (n)] = key_unit(k_source, key_row(j0, h, end), n);
#define FETCH_VALUE_UNITS(n, j0)            \
    UNROLL for (uint i = 0u; i < 4u; ++i)   \
        v.unit[i * VALUE_UNITS + (n)] = value_unit(v_source, value_row(j0, i, end), n);
#define FETCH_SCALE(held, scales, source, h, j0)                                \
        held.scale[h] = scales[SCALE_WORD(source, key_row(j0, h, end)) >> 1];   \
        held.is_second[h] = IS_SECOND(source, key_row(j0, h, end));
#define FETCH_SCALES(held, scales, source, j0) \
    UNROLL for (uint h = 0u; h < 2u; ++h) { FETCH_SCALE(held, scales, source, h, j0) }
#define FETCH_KEYS(j0)                                                                      \
    UNROLL for (uint h = 0u; h < 2u; ++h) {                                                 \
        UNROLL for (uint n = 0u; n < KEY_UNITS; ++n)                                        \
            k.unit[h * KEY_UNITS + n] = key_unit(k_source, key_row(j0, h, end), n);         \
        FETCH_SCALE(k, key_scales, k_source, h, j0)                                         \
    }
#define FETCH_VALUES(j0)                                                                    \
    UNROLL for (uint i = 0u; i < 4u; ++i)                                                   \
        UNROLL for (uint n = 0u; n < VALUE_UNITS; ++n)                                      \
            v.unit[i * VALUE_UNITS + n] = value_unit(v_source, value_row(j0, i, end), n);   \
    FETCH_SCALES(v, value_scales, v_source, j0)

// Which vec of a query belongs to matrix i, and which vec of the output to matrices 2 b and 2 b + 1.
#if defined(BLOCKS)
uint query_vec_index(uint i) { return 8u * (i / 2u) + 2u * t() + i % 2u; }
#else
uint query_vec_index(uint i) { return 16u * (i / 4u) + 4u * t() + i % 4u; }
#endif
#if defined(KEY_INT8) && WIDTH == 128
uint output_vec_index(uint b) { return 4u * g() + b; }
#else
uint output_vec_index(uint b) { return 8u * b + g(); }
#endif

// The bits of two halves of 1024, as a number that the compiler does not know (the flags are few bits): see two_23_bits
// in code_units.glsl.
uint two_1024_bits() { return 0x64006400u | flags() >> 31; }

#if defined(KEY_Q4_0)
// Of both halves the codes where `mask` is: in bits 0 .. 3, or in bits 4 .. 7, less 8.
HALF2 nibbles_of(uint bits, uint mask, HALF factor, HALF bias, uint two_1024) {
    return fma(halves(bits & mask | two_1024), HALF2(factor), HALF2(-bias));
}
#define LOW_NIBBLES(bits) nibbles_of(bits, 0x000F000Fu, HALF(1.0), HALF(1032.0), two_1024)
#define HIGH_NIBBLES(bits) nibbles_of(bits, 0x00F000F0u, HALF(0.0625), HALF(72.0), two_1024)
#else
// Of both halves the codes in bits 0 .. 7, less a bias that has 1024 more.
HALF2 codes_of(uint bits, HALF2 bias, uint two_1024) { return halves(bits & 0x00FF00FFu | two_1024) - bias; }
#endif

// A half of 1024 + 128 + zero point. A zero point that is none, in a row that nobody attends, makes no NaN.
uint bias_bits(uint zero_point) { return 0x6400u + (zero_point + 128u & 0xFFu); }
#endif
