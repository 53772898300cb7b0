// The merge of split.glsl by subgroups: each takes a row's vecs, as many as it has invocations, and some of the parts.
// Its invocations load a part's state each, and hand the weights round; no state is loaded twice, none is merged twice.
// Includer must define MERGE_SHUFFLED before it includes split.glsl, which says what else.
#ifndef VKATTN_MERGE_SHUFFLED
#define VKATTN_MERGE_SHUFFLED

// Of vec e of a row: its sum over every `ways`-th part from part `way` on, relative to the maximum over all parts, and
// the row's state. By a whole subgroup, which knows the same row and way.
vec2 merge_shuffled(uint at, uint e, uint way, uint ways, out vec4 sum) {
    uint splits = num_splits(), step = uint(ROWS) * (1u + value_vecs());
    vec2 whole = vec2(LOWEST, 0.0);
    sum = vec4(0.0);
    for (uint start = 0u; start < splits; start += gl_SubgroupSize) {  // once, unless there are very many parts
        uint count = min(splits - start, gl_SubgroupSize), own = min(gl_SubgroupInvocationID, count - 1u);
        vec2 state = parts[at + (start + own) * step].xy;
        if (gl_SubgroupInvocationID >= count) state = vec2(LOWEST, 0.0);
        float weight = 0.0;
        for (uint s = way; s < count || s == way; s += FLYING * ways) {
            vec4 x[FLYING];
            [[unroll]] for (uint t = 0u; t < FLYING; ++t)
                x[t] = parts[at + (start + min(s + t * ways, count - 1u)) * step + 1u + e];
            if (s == way) {  // the states, behind the first loads
                float new_max = max(whole.x, state.x);
                for (uint i = 1u; i < gl_SubgroupSize; i *= 2u) new_max = max(new_max, subgroupShuffleXor(new_max, i));
                weight = state.y == 0.0 ? 0.0 : exp(state.x - new_max);  // an empty part holds nothing
                float total = state.y * weight;
                for (uint i = 1u; i < gl_SubgroupSize; i *= 2u) total += subgroupShuffleXor(total, i);
                float shrink = exp(whole.x - new_max);
                sum *= shrink;
                whole = vec2(new_max, whole.y * shrink + total);
            }
            [[unroll]] for (uint t = 0u; t < FLYING; ++t) {
                float w = subgroupShuffle(weight, min(s + t * ways, count - 1u));
                if (s + t * ways < count && w > 0.0) sum = fma(x[t], vec4(w), sum);
            }
        }
    }
    return whole;
}

// Merge all splits of the item's rows.
void merge_parts(RowTile tile, uint item) {
    uint chunks = (out_vecs() + gl_SubgroupSize - 1u) / gl_SubgroupSize;  // of a row
    uint units = min(tile.rows - tile.first, uint(ROWS)) * chunks, ways = max(gl_NumSubgroups / units, 1u);
    for (uint first = 0u; first < units; first += gl_NumSubgroups) {  // once, if there are several ways
        uint unit = first + (ways > 1u ? gl_SubgroupID % units : gl_SubgroupID);
        uint way = ways > 1u ? gl_SubgroupID / units : 0u;
        uint r = unit / chunks, e = unit % chunks * gl_SubgroupSize + gl_SubgroupInvocationID;
        bool is_live = unit < units && way < ways;
        vec4 sum = vec4(0.0);
        vec2 whole = vec2(LOWEST, 0.0);
        if (is_live) whole = merge_shuffled(part_index(item, 0u, r), min(e, value_vecs() - 1u), way, ways, sum);
        if (ways > 1u) {
            WAY_SUMS[gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID] = sum;
            barrier();
            for (uint w = 1u; way == 0u && w < ways; ++w)
                sum += WAY_SUMS[(gl_SubgroupID + w * units) * gl_SubgroupSize + gl_SubgroupInvocationID];
        }
        if (is_live && way == 0u && e < out_vecs()) {
            write_out(tile, tile.first + r, e, e < value_vecs() ? sum : vec4(0.0), whole);
            if (e == 0u) write_lse(tile, tile.first + r, whole);
        }
    }
    barrier();
}
#endif
