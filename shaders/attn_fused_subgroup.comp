// Purpose   attention in one dispatch, for prefill on devices where a load costs as much as a hundred multiply-adds:
//           software Vulkan, which loads for each invocation in turn
// Maths     as attn_fused: an online softmax over tiles of keys
// Bindings  as attn_fused (include/fused.glsl)
// Grid      any number of workgroups; each takes 128 rows x 128 elements of value_dim after another, the rows that see
//           most keys first. 32 invocations own 4 rows each, with all their scores, weights and sums; 32 keys at a time
//           are loaded by 8 lanes of a subgroup and shared by shuffles, which are an instruction there where a
//           broadcast is many. Subgroups never wait for each other
// Push      as attn_fused
// Bounds    as attn_fused, where a tile is the rows of one subgroup x 32 keys
// Requires  subgroups of 8 invocations or more; shuffle, vote and arithmetic. No other size is assumed, nor how
//           invocations fall into subgroups
// Source    online softmax: Milakov and Gimelshein 2018; compensated sum: Kahan 1965; sums in blocks: Higham 2002,
//           section 4.2
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require

layout(local_size_x = 32) in;
const uint THREADS = 32u, ROWS = 4u;  // invocations; rows of each
#define BLOCK_ROWS 128u
#include "fused.glsl"

const uint LANES = 8u, LOADS = 4u;  // keys loaded at once, and how often in a tile
const uint BLOCK_COLS = LANES * LOADS, ROW_VECS = BLOCK_COLS / 4u;
const uint BLOCK_VECS = 32u;  // vecs of value_dim; the loops over them stay loops, or compiling takes 20 times as long
const uint SUM_KEYS = 1024u;  // keys whose part of the output is summed by itself, so that rounding stays small
#define EACH_LANE(STEP) STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)

shared vec4 scores[ROW_VECS * ROWS * THREADS];  // each invocation reads its own only

struct Rows {
    ScoreRow at[ROWS];
    float row_max[ROWS], row_sum[ROWS], lost[ROWS];  // lost: what row_sum has lost to rounding
};

// Where the scores of row i with keys 4 n and on lie.
uint score_at(uint i, uint n) { return (i * ROW_VECS + n) * THREADS + gl_LocalInvocationIndex; }

// Adds the dot products of four vecs of queries with one vec of each key of the tile.
void add_dots(inout vec4 s[ROWS * ROW_VECS], vec4 q[ROWS], uint key_at, uint key_row, uint d, uint col,
              uint end) {
    [[unroll]] for (uint t = 0u; t < LOADS; ++t) {
        uint j = col + LANES * t;
        vec4 mine = j < end ? read_key(key_at + j * key_row, d) : vec4(0.0), k;
#define STEP(n)                            \
    k = subgroupShuffle(mine, uint(n));   \
    [[unroll]] for (uint i = 0u; i < ROWS; ++i) s[i * ROW_VECS + 2u * t + uint(n) / 4u][uint(n) % 4u] += dot(q[i], k);
        EACH_LANE(STEP)
#undef STEP
    }
}

// Turns scores, scaled by `scale`, into weights; returns by how much what each row has so far shrinks.
float[ROWS] weigh(inout Rows rows, inout vec4 s[ROWS * ROW_VECS], float scale) {
    float factor[ROWS];
    [[unroll]] for (uint i = 0u; i < ROWS; ++i) {
        float new_max = rows.row_max[i];
        [[unroll]] for (uint n = 0u; n < ROW_VECS; ++n) {
            vec4 x = scores[score_at(i, n)] * scale;
            new_max = max(new_max, max(max(x.x, x.y), max(x.z, x.w)));
            s[i * ROW_VECS + n] = x;
        }
        precise float sum = 0.0;
        [[unroll]] for (uint n = 0u; n < ROW_VECS; ++n) {
            vec4 x = s[i * ROW_VECS + n];
            vec4 w = mix(vec4(0.0), exp(x - new_max), notEqual(floatBitsToUint(x), uvec4(MINUS_INFINITY)));
            s[i * ROW_VECS + n] = w;
            sum += (w.x + w.y) + (w.z + w.w);
        }
        factor[i] = exp(rows.row_max[i] - new_max);
        precise float term = sum - rows.lost[i] * factor[i];
        precise float old_sum = rows.row_sum[i] * factor[i];
        precise float new_sum = old_sum + term;
        rows.lost[i] = (new_sum - old_sum) - term;
        rows.row_sum[i] = new_sum;
        rows.row_max[i] = new_max;
    }
    return factor;
}

// One vec of the tile's part of each row's output. Values that are not finite count as 0, and are added after that
// where the weight is not 0: so they change no bit of anything else.
vec4[ROWS] product(Rows rows, vec4 p[ROWS * ROW_VECS], float scale, uint value_at, uint value_row, uint e,
                   uint col, uint end, uint col0) {
    vec4 sum[ROWS];
    bool dirty = false;
    [[unroll]] for (uint i = 0u; i < ROWS; ++i) sum[i] = vec4(0.0);
    [[unroll]] for (uint t = 0u; t < LOADS; ++t) {
        uint j = col + LANES * t;
        vec4 mine = j < end ? read_value(value_at + j * value_row, e) : vec4(0.0), v;
        bvec4 bad = not_finite(mine);
        dirty = dirty || any(bad);
        mine = mix(mine, vec4(0.0), bad);
#define STEP(n)                            \
    v = subgroupShuffle(mine, uint(n));   \
    [[unroll]] for (uint i = 0u; i < ROWS; ++i) \
        sum[i] = fma(vec4(p[i * ROW_VECS + 2u * t + uint(n) / 4u][uint(n) % 4u]), v, sum[i]);
        EACH_LANE(STEP)
#undef STEP
    }
    for (uint n = 0u; n < only_if(subgroupAny(dirty), ROW_VECS); ++n) {  // four keys; those beyond the end weigh 0
        vec4 s[ROWS];
        [[unroll]] for (uint i = 0u; i < ROWS; ++i) s[i] = scores[score_at(i, n)] * scale;
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
            vec4 v = read_value(value_at + min(col0 + 4u * n + c, end - 1u) * value_row, e);
            [[unroll]] for (uint i = 0u; i < ROWS; ++i) {
                float weight = floatBitsToUint(s[i][c]) == MINUS_INFINITY ? 0.0 : exp(s[i][c] - rows.row_max[i]);
                if (weight != 0.0) sum[i] = mix(sum[i], sum[i] + weight * v, not_finite(v));
            }
        }
    }
    return sum;
}

// What a factor of 0 wipes out may be infinite.
vec4 shrunk(vec4 sum, float factor) { return mix(vec4(0.0), sum * factor, bvec4(factor != 0.0)); }

void main() {
    uint lane = gl_LocalInvocationIndex, slot = gl_SubgroupInvocationID % LANES;
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint vec_tiles = (out_vecs() + BLOCK_VECS - 1u) / BLOCK_VECS;
    uint num_vecs = head_vecs(), key_row = key_step(), value_row = value_step();
    ScoreRule rule = score_rule();
    bool unchanged = rule.mask_kind == 0u && rule.softcap == 0.0 && (flags() & FLAG_ALIBI) == 0u;

    for (uint item = gl_WorkGroupID.x; item < tiles * vec_tiles; item += gl_NumWorkGroups.x) {
        RowTile tile = heaviest_first(first + item / vec_tiles);
        uint row0 = tile.first + ROWS * lane, e0 = item % vec_tiles * BLOCK_VECS;
        uint out_end = min(BLOCK_VECS, out_vecs() - e0), live_vecs = max(value_vecs(), e0) - e0;
        uint key_at = key_place(tile.b, tile.hk), value_at = value_place(tile.b, tile.hk);
        Rows rows;
        uint query_at[ROWS];
        uint begin = 0xFFFFFFFFu, end = 0u, all_begin = 0u, all_end = 0xFFFFFFFFu;
        [[unroll]] for (uint i = 0u; i < ROWS; ++i) {
            ScoreRow row = score_row(tile, row0 + i);
            query_at[i] = query_row(tile, row0 + i);
            if (row.begin < row.end) {
                begin = min(begin, row.begin);
                end = max(end, row.end);
            }
            if (row0 + i < tile.rows) {
                all_begin = max(all_begin, row.begin);
                all_end = min(all_end, row.end);
            }
            rows.at[i] = row;
            rows.row_max[i] = LOWEST;
            rows.row_sum[i] = rows.lost[i] = 0.0;
        }
        begin = subgroupMin(begin);
        end = subgroupMax(end);
        all_begin = subgroupMax(all_begin);
        all_end = subgroupMin(all_end);

        vec4 whole[ROWS * BLOCK_VECS], acc[ROWS * BLOCK_VECS];  // whole: the blocks before; acc: this block
        float whole_max[ROWS];                                    // the row_max that whole is relative to
        [[dont_unroll]] for (uint n = 0u; n < ROWS * out_end; ++n) whole[n] = vec4(0.0);
        [[unroll]] for (uint i = 0u; i < ROWS; ++i) whole_max[i] = LOWEST;
        for (uint block0 = begin; block0 < end; block0 += SUM_KEYS) {
            [[dont_unroll]] for (uint n = 0u; n < ROWS * out_end; ++n) acc[n] = vec4(0.0);
            for (uint col0 = block0; col0 < min(end, block0 + SUM_KEYS); col0 += BLOCK_COLS) {
                bool plain = unchanged && col0 >= all_begin && col0 + BLOCK_COLS <= all_end;
                uint open[ROWS];
                [[unroll]] for (uint i = 0u; i < ROWS; ++i) open[i] = 0u;
                for (uint c = 0u; c < only_if(!plain, BLOCK_COLS); ++c)
                    [[unroll]] for (uint i = 0u; i < ROWS; ++i)
                        if (attended(rule, rows.at[i], col0 + c)) open[i] |= 1u << c;
                if (!plain && !subgroupAny((open[0] | open[1] | open[2] | open[3]) != 0u)) continue;

                vec4 s[ROWS * ROW_VECS];
                [[unroll]] for (uint n = 0u; n < ROWS * ROW_VECS; ++n) s[n] = vec4(0.0);
                for (uint d = 0u; d < num_vecs; ++d) {
                    vec4 q[ROWS];
                    [[unroll]] for (uint i = 0u; i < ROWS; ++i)
                        q[i] = row0 + i < tile.rows ? read_query(query_at[i] + d) : vec4(0.0);
                    add_dots(s, q, key_at, key_row, d, col0 + slot, end);
                }
                [[unroll]] for (uint i = 0u; i < ROWS; ++i)
                    [[unroll]] for (uint n = 0u; n < ROW_VECS; ++n) scores[score_at(i, n)] = s[i * ROW_VECS + n];
                for (uint c = 0u; c < only_if(!plain, BLOCK_COLS); ++c) {
                    [[unroll]] for (uint i = 0u; i < ROWS; ++i) {
                        uint at = score_at(i, c / 4u);
                        float x = open_score(scores[at][c % 4u], rule, rows.at[i], col0 + c);
                        bool is_open = (open[i] >> c & 1u) != 0u;
                        scores[at][c % 4u] = is_open ? x : uintBitsToFloat(MINUS_INFINITY);
                    }
                }
                float scale = plain ? rule.scale : 1.0;
                float factor[ROWS] = weigh(rows, s, scale);
                [[dont_unroll]] for (uint e = 0u; e < min(live_vecs, BLOCK_VECS); ++e) {
                    vec4 part[ROWS] = product(rows, s, scale, value_at, value_row, e0 + e, col0 + slot, end,
                                              col0);
                    [[unroll]] for (uint i = 0u; i < ROWS; ++i)
                        acc[ROWS * e + i] = shrunk(acc[ROWS * e + i], factor[i]) + part[i];
                }
            }
            [[unroll]] for (uint i = 0u; i < ROWS; ++i) {
                float factor = exp(whole_max[i] - rows.row_max[i]);
                [[dont_unroll]] for (uint e = 0u; e < out_end; ++e)
                    whole[ROWS * e + i] = shrunk(whole[ROWS * e + i], factor) + acc[ROWS * e + i];
                whole_max[i] = rows.row_max[i];
            }
        }
        bool write_lse = e0 == 0u && (flags() & FLAG_LSE) != 0u;
        [[unroll]] for (uint i = 0u; i < ROWS; ++i) {
            float factor = finish_row(tile, row0 + i, rows.row_max[i], rows.row_sum[i], write_lse);
            uint at = out_row(tile, row0 + i) + e0;
            [[dont_unroll]] for (uint e = 0u; e < only_if(row0 + i < tile.rows, out_end); ++e)
                write_output(at + e, whole[ROWS * e + i] * factor);
        }
    }
}
