"""Scores of paged e4m3 keys on Hopper: one CTA per SM, which takes its share of all pages.

A page with its scales is one box of the copy engine. The keys are the A operand of wgmma, the heads
of a group's rows are B: 64 keys times up to 128 heads in one product, which four math warpgroups
take in turn, one page each. Warp 0 issues all copies.

No CTA waits for a schedule. Its first pages follow from its number: their block-table entries are
read in the first instructions. Meanwhile warp 1 reads the lengths and adds up the pages of all
groups; what is left is dealt evenly, a contiguous run to each CTA.

The issuer leaves a descriptor of the item beside each page, so that the math warps follow no table.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from .. import arithmetic, ptx
from ..cta import SharedMemory, shared_address
from .arguments import (
    FLAG_FILL,
    FLAG_KEEP,
    FLAG_MXFP8,
    FLAG_WEIGHTS_BF16,
    HEAD_DIM,
    MAX_ENTRIES,
    ScoresArguments,
    chosen_layer,
    divide,
    length_of,
    load_entry,
    load_lengths,
    longest_of,
    page_of,
    rows_of,
    select,
)

GROUPS = 4  # math warpgroups
WARPS = 4 * GROUPS
FIRST_WARP = 4  # of them: a warpgroup begins at a multiple of four
THREADS = 32 * (FIRST_WARP + WARPS)  # two of the warps before them have nothing to do
STATIC = 4  # pages per CTA that need no prefix sum; measured best of 0, 1, 2, 4, 8
BATCH = 32  # items whose entries and lengths the issuer loads together, one a lane
FILL = 1024  # columns that a warp fills at a time
SHARED_LIMIT = 232448  # bytes per CTA on sm_90
NEGATIVE_INFINITY = float("-inf")

# What a descriptor's tag says of its page, below the ordinal of the group
ABSENT, PRESENT, SKIPPED = 0, 1, 2

# Named barriers
BARRIER_OPEN = 1  # the mbarriers are initialised
OPEN_THREADS = 32 * (WARPS + 1)  # of the math warps, and of the issuer
BARRIER_READY = 2  # and the prefix sum is there
READY_THREADS = 32 * (WARPS + 2)  # and of warp 1


class Paged:
    """The kernel for one number of heads, of rows that share a read, and of tokens per page."""

    cluster = 1
    threads = THREADS
    most_stages = 12
    query_comes_first = True

    def __init__(self, heads, rows, page_size):
        self.heads, self.rows, self.page_size = heads, rows, page_size
        self.columns = heads * rows  # of the product
        self.tiles = -(-page_size // 64)  # products per page
        self.page_bytes, self.stage_bytes, self.query_bytes = self.sizes()
        # As many query stages as page stages: the query of a group is then free as soon as the page
        # stage of its first item is, because the groups in between had an item each. Fewer would
        # bound rows of one page each. A multiple of the math groups, so that a stage is always
        # the same one's; else a group that is a lap behind would take the old phase for the new.
        self.stages = self.most_stages
        while self.layout().nbytes() > SHARED_LIMIT:
            self.stages -= GROUPS
        self.shared = self.layout()
        # The issuer waits for so many stages at once, one a lane: item by item it took 500 clocks
        # each. They divide the first pages and all stages evenly.
        self.chunk = 4 if self.stages > 8 else 2
        assert self.stages >= STATIC + GROUPS  # else the parities of `issue` pass their first lap
        assert self.stages % GROUPS == 0 and STATIC % self.chunk == 0 == BATCH % self.chunk

    def sizes(self):
        """(bytes of a page, of its stage, of a group's query in shared memory)"""
        page_bytes = self.page_size * (HEAD_DIM + 4)
        # wgmma reads 64 rows also where a page has 32; the others' scores are never stored
        stage_bytes = -(-max(page_bytes, 64 * HEAD_DIM) // 1024) * 1024
        return page_bytes, stage_bytes, self.columns * HEAD_DIM

    def layout(self):
        return SharedMemory(
            {
                "pages": (self.stages * self.stage_bytes, 1024),
                "queries": (self.stages * self.query_bytes, 1024),
                "weights": (self.stages * self.columns * 4, 128),
                "descriptors": (self.stages * 32, 32),
                # i32 [entries], pages of all groups up to and with this entry
                "ends": (MAX_ENTRIES * 4, 16),
                "share": (8, 8),  # first page and number of pages of this CTA
                # mbarriers: a full one per stage, an empty one, one of the query stage
                "bars": (3 * self.stages * 8, 8),
            }
        )

    @cute.jit
    def __call__(self, arguments: ScoresArguments, stream):
        queries, keys = self.tensor_maps(arguments, 2)
        # No launch happens here: the handler sets the grid.
        self.kernel(queries, keys, arguments).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    def tensor_maps(self, arguments, count):
        """Parameters for tensor maps; their contents are the handler's."""
        tensor = cute.make_tensor(
            cute.make_ptr(Uint8, arguments.query, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((1 << 20, HEAD_DIM), stride=(HEAD_DIM, 1)),
        )
        box = (8, HEAD_DIM)
        shared = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout(box, stride=(HEAD_DIM, 1))
        )
        operation = cpasync.CopyBulkTensorTileG2SOp()
        return [
            cpasync.make_tiled_tma_atom(operation, tensor, shared, box)[0] for _ in range(count)
        ]

    @cute.kernel
    def kernel(self, queries: cute.CopyAtom, keys: cute.CopyAtom, arguments: ScoresArguments):
        self.run(arguments, [map_address(atom) for atom in (keys, queries)])

    @cute.jit
    def run(self, arguments, maps):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        shared = {name: shared_address(p) for name, p in self.shared.allocate().items()}
        shared["empty"] = shared["bars"] + 8 * self.stages
        shared["bars_query"] = shared["empty"] + 8 * self.stages
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            self.issue(arguments, maps, shared, cta, ctas, lane)
            cute.arch.griddepcontrol_launch_dependents()
        elif warp == 1:
            self.add_up(arguments, shared, cta, ctas, lane)
            cute.arch.barrier_arrive(barrier_id=BARRIER_READY, number_of_threads=READY_THREADS)
        elif warp >= FIRST_WARP:
            math_warp = warp - FIRST_WARP
            self.open_barriers(shared, math_warp)
            cute.arch.barrier_arrive(barrier_id=BARRIER_OPEN, number_of_threads=OPEN_THREADS)
            cute.arch.barrier(barrier_id=BARRIER_READY, number_of_threads=READY_THREADS)
            self.take_pages(arguments, shared, math_warp, lane)
            if (arguments.flags & FLAG_FILL) != 0:
                self.fill(arguments, cta * WARPS + math_warp, ctas * WARPS, lane)

    @cute.jit
    def open_barriers(self, shared, warp):
        """Spread over the warps: one takes about 60 clocks, and all in one warp 1,800."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(-(-3 * self.stages // WARPS)):
                bar = warp + i * WARPS
                if bar < 3 * self.stages:
                    is_empty = (bar >= self.stages) & (bar < 2 * self.stages)
                    ptx.mbarrier_init(
                        shared["bars"] + 8 * bar, select(is_empty, Int32(4), Int32(1))
                    )
            ptx.mbarrier_init_fence()
        cute.arch.sync_warp()

    # Which CTA takes which pages ------------------------------------------------------------------

    def limit(self, arguments):
        """The largest length."""
        return arguments.table_width * self.page_size

    def ctas_of(self, arguments, group):
        """How many CTAs begin with a group (that any begins with)."""
        return arguments.ctas_per_group + select(
            group < arguments.groups_with_more, Int32(1), Int32(0)
        )

    def static_pages(self, arguments, group, ctas):
        """How many of a group's pages are dealt without looking at lengths."""
        return select(group < ctas, STATIC * self.ctas_of(arguments, group), Int32(0))

    def load_group(self, arguments, group):
        _, row, count = rows_of(arguments, group, self.rows)
        return load_lengths(arguments, row, count, self.rows)

    def rest(self, arguments, group, words, ctas):
        """How many pages of a group are left for the prefix sum, of the words of its lengths."""
        longest = longest_of(arguments, words, self.limit(arguments))
        pages = divide(longest + (self.page_size - 1), self.page_size)
        return cutlass.max(Int32(0), pages - self.static_pages(arguments, group, ctas))

    def rests(self, arguments, groups, ctas):
        """The same of several groups, whose lengths are all asked for before one is waited for; 0
        of groups that do not exist."""
        last = arguments.groups - 1
        words = [self.load_group(arguments, cutlass.min(group, last)) for group in groups]
        return [
            select(group <= last, self.rest(arguments, group, lengths, ctas), Int32(0))
            for group, lengths in zip(groups, words, strict=True)
        ]

    @cute.jit
    def add_up(self, arguments, shared, cta, ctas, lane):
        """The prefix sum over the groups, and this CTA's share of the total; by one warp."""
        entries, ends = arguments.entries, shared["ends"]
        total = Int32(0)
        if entries <= 32:
            total = self.sum_over_lanes(self.rests(arguments, [lane], ctas)[0], lane)
            ptx.store_shared_i32(ends + lane * 4, total)
        elif entries <= 128:
            rests = self.rests(arguments, [lane * 4 + i for i in range(4)], ctas)
            for i in cutlass.range_constexpr(1, 4):
                rests[i] = rests[i - 1] + rests[i]
            total = self.sum_over_lanes(rests[3], lane)
            before = total - rests[3]
            ptx.store_shared_16b(ends + lane * 16, [before + rest for rest in rests])
        else:
            each = (entries + 31) >> 5  # entries of a lane
            if arguments.groups_per_entry == 1:
                for i in cutlass.range(0, each, 4):
                    first = i * 32 + lane
                    rests = self.rests(arguments, [first + 32 * j for j in range(4)], ctas)
                    for j in cutlass.range_constexpr(4):
                        ptx.store_shared_i32(ends + (first + 32 * j) * 4, rests[j])
            else:
                for entry in cutlass.range(each * 32):
                    first = entry * arguments.groups_per_entry
                    end = cutlass.min(first + arguments.groups_per_entry, arguments.groups)
                    rest = Int32(0)
                    for group in cutlass.range(first + lane, end, 32):
                        words = self.load_group(arguments, group)
                        rest = rest + self.rest(arguments, group, words, ctas)
                    rest = cute.arch.warp_redux_sync(rest, "add")
                    if lane == 0:
                        ptx.store_shared_i32(ends + entry * 4, rest)
            cute.arch.sync_warp()
            mine = ends + lane * each * 4
            for i in cutlass.range(each):
                total = total + ptx.load_shared_i32(mine + i * 4)
                ptx.store_shared_i32(mine + i * 4, total)
            before = self.sum_over_lanes(total, lane) - total
            for i in cutlass.range(each):
                ptx.store_shared_i32(mine + i * 4, before + ptx.load_shared_i32(mine + i * 4))
            total = before + total
        total = cute.arch.shuffle_sync(total, 31)
        quotient = divide(total, ctas)
        remainder = total - quotient * ctas
        if lane == 0:
            first = cta * quotient + cutlass.min(cta, remainder)
            ptx.store_shared_i32(shared["share"], first)
            own = quotient + select(cta < remainder, Int32(1), Int32(0))
            ptx.store_shared_i32(shared["share"] + 4, own)

    def sum_over_lanes(self, value, lane):
        """Of this lane's value and those of the lanes before."""
        for distance in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(value, distance)
            value = value + select(lane >= distance, other, Int32(0))
        return value

    # The issuing warp -----------------------------------------------------------------------------

    @cute.jit
    def issue(self, arguments, maps, shared, cta, ctas, lane):
        spread = cutlass.min(arguments.groups, ctas)
        place = (cta * arguments.reciprocal) >> 20
        group = cta - place * spread
        sequence, row, count = rows_of(arguments, group, self.rows)
        column = place + lane * self.ctas_of(arguments, group)
        inside = (lane < STATIC) & (column < arguments.table_width)
        words = load_entry(arguments, sequence, select(inside, column, Int32(0)))
        lengths = load_lengths(arguments, row, count, self.rows)
        layer = chosen_layer(arguments)
        with cute.arch.elect_one():
            for tensor_map in cutlass.range_constexpr(len(maps)):
                ptx.prefetch_tensor_map(maps[tensor_map])
        policy = ptx.evict_first_policy()
        page, state, lengths = self.resolve(arguments, words, lengths, column, count)
        if lane < STATIC:
            tag = select(inside, state, Int32(SKIPPED))
            self.describe(shared, lane, row, column, tag, lengths)
        page = select(state == PRESENT, page, Int32(-1))
        cute.arch.barrier(barrier_id=BARRIER_OPEN, number_of_threads=OPEN_THREADS)
        static = [cute.arch.shuffle_sync(page, i) for i in range(STATIC)]
        if cutlass.const_expr(not self.query_comes_first):
            self.copy_pages(maps, shared, Int32(0), static, Int32(STATIC), layer, policy)
        if cute.arch.vote_any_sync(lengths_exceed(lengths, 0)):
            self.copy_query(arguments, maps, shared, 0, row, count, lane)
        else:  # padding: only the phase of the barrier counts
            with cute.arch.elect_one():
                ptx.mbarrier_arrive(shared["bars_query"])
        if cutlass.const_expr(self.query_comes_first):
            self.copy_pages(maps, shared, Int32(0), static, Int32(STATIC), layer, policy)
        cute.arch.sync_warp()  # one lane was away; a barrier takes whole warps
        cute.arch.barrier(barrier_id=BARRIER_READY, number_of_threads=READY_THREADS)
        first = ptx.load_shared_i32(shared["share"])
        own = ptx.load_shared_i32(shared["share"] + 4)
        if own > 0:
            stage, parity = Int32(STATIC % self.stages), Int32(1)
            # The group and the ordinal of the item before
            before = (group, Int32(0))
            batch, before = self.look_up(arguments, shared, first, own, ctas, lane, before)
            for done in cutlass.range(0, own, BATCH):
                following = batch
                if done + BATCH < own:
                    following, before = self.look_up(
                        arguments,
                        shared,
                        first + done + BATCH,
                        own - done - BATCH,
                        ctas,
                        lane,
                        before,
                    )
                (row, count, column, tag, fresh), words, lengths = batch
                page, state, lengths = self.resolve(arguments, words, lengths, column, count)
                page = select(state == PRESENT, page, Int32(-1))
                count_here = cutlass.min(own - done, BATCH)
                for i in cutlass.range(0, count_here, self.chunk):
                    after = cutlass.min(i + self.chunk, count_here)
                    if (lane >= i) & (lane < after):
                        mine = stage + lane - i
                        ptx.mbarrier_wait(shared["empty"] + 8 * mine, parity)
                        self.describe(shared, mine, row, column, tag + state, lengths)
                    cute.arch.sync_warp()
                    if ((fresh >> i) & ((1 << self.chunk) - 1)) != 0:
                        for j in cutlass.range(i, after):
                            if ((fresh >> j) & 1) != 0:
                                slot = self.query_stage(cute.arch.shuffle_sync(tag, j) >> 2)
                                self.copy_query(
                                    arguments,
                                    maps,
                                    shared,
                                    slot,
                                    cute.arch.shuffle_sync(row, j),
                                    cute.arch.shuffle_sync(count, j),
                                    lane,
                                )
                    pages = [cute.arch.shuffle_sync(page, i + j) for j in range(self.chunk)]
                    self.copy_pages(maps, shared, stage, pages, after - i, layer, policy)
                    stage = stage + self.chunk
                    if stage == self.stages:
                        stage = Int32(0)
                        parity = parity ^ 1
                batch = following

    def query_stage(self, ordinal):
        return ordinal - divide(ordinal, self.stages) * self.stages

    @cute.jit
    def look_up(self, arguments, shared, first, count, ctas, lane, before):
        """Finds this lane's item among those from `first` on and starts to load what it needs.

        Returns ((row, rows of the group, column of the table, ordinal of the group * 4, mask of the
        lanes that begin a group), words of the entry, words of the lengths), and the next
        `before`."""
        item = first + cutlass.min(lane, count - 1)
        entry = Int32(0)
        stride = Int32(1) << arguments.search_steps
        for _ in cutlass.range(arguments.search_steps):
            stride = stride >> 1
            probe = cutlass.min(entry + stride, arguments.entries - 1)
            if ptx.load_shared_i32(shared["ends"] + (probe - 1) * 4) <= item:
                entry = probe
        start = Int32(0)
        if entry > 0:
            start = ptx.load_shared_i32(shared["ends"] + (entry - 1) * 4)
        page, group = item - start, entry * arguments.groups_per_entry
        if arguments.groups_per_entry > 1:
            rest = self.rest(arguments, group, self.load_group(arguments, group), ctas)
            while page >= rest:
                page = page - rest
                group = group + 1
                rest = self.rest(arguments, group, self.load_group(arguments, group), ctas)
        sequence, row, rows = rows_of(arguments, group, self.rows)
        column = page + self.static_pages(arguments, group, ctas)
        words = load_entry(arguments, sequence, column)
        lengths = load_lengths(arguments, row, rows, self.rows)
        previous = cute.arch.shuffle_sync_up(group, 1)
        previous = select(lane == 0, before[0], previous)
        fresh = cute.arch.vote_ballot_sync(group != previous)
        ordinal = before[1] + cute.arch.popc(fresh & ((Int32(2) << lane) - 1))
        last = cute.arch.shuffle_sync(group, 31), cute.arch.shuffle_sync(ordinal, 31)
        return ((row, rows, column, ordinal * 4, fresh), words, lengths), last

    def resolve(self, arguments, words, lengths, column, count):
        """(page or -1, state, lengths) of what `look_up` has loaded; the length of a row that the
        group does not have is -1."""
        page = page_of(arguments, words)
        limit = self.limit(arguments)
        lengths = [length_of(arguments, length, limit) for length in lengths]
        state = select(page < 0, Int32(ABSENT), Int32(PRESENT))
        reached = lengths_exceed(lengths, column * self.page_size)
        state = select(reached, state, Int32(SKIPPED))
        lengths = [lengths[0]] + [
            select(r < count, lengths[r], Int32(-1)) for r in range(1, self.rows)
        ]
        return page, state, lengths

    def describe(self, shared, stage, row, column, tag, lengths):
        address = shared["descriptors"] + stage * 32
        ptx.store_shared_16b(address, (row, column, tag, lengths[0]))
        if self.rows > 1:
            ptx.store_shared_16b(address + 16, (lengths + [Int32(-1)] * 3)[1:5])

    @cute.jit
    def copy_pages(self, maps, shared, stage, pages, count, layer, policy):
        """The first `count` of `pages` into the stages from `stage` on; nothing where it is -1.

        In one piece: with 60 instructions between two copies the issuer bounded mxfp4."""
        bar = shared["bars"] + 8 * stage
        target = shared["pages"] + stage * self.stage_bytes
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(pages)):
                if i < count:
                    if pages[i] >= 0:
                        ptx.mbarrier_expect(bar + 8 * i, self.page_bytes)
                        place = target + i * self.stage_bytes
                        ptx.tensor_copy_4d(place, maps[0], (pages[i], layer), bar + 8 * i, policy)
                    else:
                        ptx.mbarrier_arrive(bar + 8 * i)

    @cute.jit
    def copy_query(self, arguments, maps, shared, slot, row, count, lane):
        """The heads of a group's rows and their weights; by the whole warp. The box is that of
        `rows` rows: where the group has fewer, the next rows' heads come along, or zeros."""
        width = Int32(4)
        if (arguments.flags & FLAG_WEIGHTS_BF16) != 0:
            width = Int32(2)
        with cute.arch.elect_one():
            bar = shared["bars_query"] + 8 * slot
            nbytes = count * self.heads * width
            ptx.mbarrier_expect(bar, nbytes + self.query_bytes)
            queries = shared["queries"] + slot * self.query_bytes
            ptx.tensor_copy_2d(queries, maps[1], 0, row * self.heads, bar)
            source = arguments.weights + Int64(row) * (self.heads * width)
            ptx.bulk_copy(shared["weights"] + slot * (self.columns * 4), source, nbytes, bar)

    # The math warps -------------------------------------------------------------------------------

    @cute.jit
    def take_pages(self, arguments, shared, warp, lane):
        group = warp >> 2
        items = ptx.load_shared_i32(shared["share"] + 4) + STATIC
        stage, parity, current = group, Int32(0), Int32(-1)
        queries, weights = Int32(0), Int32(0)
        policy = ptx.evict_normal_policy()
        if (arguments.flags & FLAG_KEEP) != 0:
            policy = ptx.evict_last_policy()
        for _ in cutlass.range(group, items, GROUPS):
            ptx.mbarrier_wait(shared["bars"] + 8 * stage, parity)
            address = shared["descriptors"] + stage * 32
            row, column, tag, length = ptx.load_shared_i32x4(address)
            lengths = [length]
            if cutlass.const_expr(self.rows > 1):
                lengths += ptx.load_shared_i32x4(address + 16)[: self.rows - 1]
            if (tag >> 2) != current:
                # Also where the page is none: a query that nobody waits for may still be on its way
                # when its stage is used again, and a barrier that one phase arrives at twice traps.
                current = tag >> 2
                slot = self.query_stage(current)
                lap = divide(current, self.stages)
                ptx.mbarrier_wait(shared["bars_query"] + 8 * slot, lap & 1)
                queries = shared["queries"] + slot * self.query_bytes
                weights = shared["weights"] + slot * (self.columns * 4)
            state = tag & 3
            if state == PRESENT:
                operands = queries, weights
                self.score_page(
                    arguments, policy, shared, stage, operands, row, column, lengths, warp, lane
                )
            else:
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.mbarrier_arrive(shared["empty"] + 8 * stage)
                if state == ABSENT:
                    for tile in cutlass.range_constexpr(self.tiles):
                        nothing = [Float32(NEGATIVE_INFINITY)] * self.rows
                        self.store(
                            arguments, policy, tile, row, column, lengths, nothing, warp, lane
                        )
            stage = stage + GROUPS
            if stage >= self.stages:
                stage = stage - self.stages
                parity = parity ^ 1

    @cute.jit
    def score_page(
        self, arguments, policy, shared, stage, operands, row, column, lengths, warp, lane
    ):
        queries, weights = operands
        page = shared["pages"] + stage * self.stage_bytes
        scores = []
        for tile in cutlass.range_constexpr(self.tiles):
            accumulator, scale = self.multiply(arguments, page, queries, tile, warp, lane)
            accumulator = arithmetic.wgmma_wait(accumulator, 0)
            sums = [Float32(0)] * (2 * self.rows)
            if (arguments.flags & FLAG_WEIGHTS_BF16) != 0:
                sums = self.weighted(accumulator, weights, lane, True)
            else:
                sums = self.weighted(accumulator, weights, lane, False)
            if cutlass.const_expr(tile == self.tiles - 1):
                cute.arch.sync_warp()
                if lane == 0:  # the page, its query and its weights have been read
                    ptx.mbarrier_arrive(shared["empty"] + 8 * stage)
            scores = self.sum_over_quad(sums, lane)
            scores = [
                arithmetic.multiply(arithmetic.multiply(s, Float32(0.5)), scale) for s in scores
            ]
            self.store(arguments, policy, tile, row, column, lengths, scores, warp, lane)

    def multiply(self, arguments, page, queries, tile, warp, lane):
        """(the product of 64 keys and all heads, still under way; the scale of this lane's key)"""
        accumulator = arithmetic.wgmma_64xnx128_e4m3(
            arithmetic.swizzled_descriptor(page + tile * (64 * HEAD_DIM)),
            arithmetic.swizzled_descriptor(queries),
            self.columns,
        )
        return accumulator, self.key_scale(arguments, page, self.key(tile, warp, lane))

    def key(self, tile, warp, lane):
        """The key of the page whose score this lane stores."""
        return tile * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * (lane & 1)

    def key_scale(self, arguments, page, key):
        """The scales lie behind the keys, 32 to a row of the box, and are swizzled with it."""
        offset = (key * 4) ^ ((key >> 5) << 4)
        word = ptx.load_shared_u32(page + (self.page_size * HEAD_DIM + offset))
        return arithmetic.float_of(
            select(arguments.flags & FLAG_MXFP8, power_of_two(word & 0xFF), word)
        )

    def weighted(self, accumulator, weights, lane, is_bf16):
        """Per row, twice the sum over this lane's heads of max(dot, 0) * weight, for its lower and
        its upper key."""
        sums = []
        for r in range(self.rows):
            # Two chains per key; their order is the same in every variant.
            chains = [Float32(0)] * 4
            for i in range(self.heads // 8):
                pair = (r * self.heads + 8 * i) // 2 + (lane & 3)
                if is_bf16:
                    word = ptx.load_shared_u32(weights + pair * 4)
                    low = arithmetic.float_of(word << 16)
                    high = arithmetic.float_of(word & Uint32(0xFFFF0000))
                else:
                    low, high = ptx.load_shared_f32x2(weights + pair * 8)
                dots = accumulator[4 * (r * (self.heads // 8) + i) :][:4]
                for c, weight in enumerate((low, high, low, high)):
                    chains[c] = arithmetic.fma(
                        arithmetic.twice_positive(dots[c]), weight, chains[c]
                    )
            sums += [chains[0] + chains[1], chains[2] + chains[3]]
        return sums

    def sum_over_quad(self, sums, lane):
        """Per row, the sum over the four lanes that share two keys: lanes with bit 0 keep the upper
        key; with several rows, those with bit 1 keep the odd one."""
        kept = []
        for r in range(self.rows):
            low, high = sums[2 * r : 2 * r + 2]
            odd = (lane & 1) != 0
            sent = cute.arch.shuffle_sync_bfly(select(odd, low, high), 1)
            kept.append(select(odd, high, low) + sent)
        if self.rows == 1:
            return [kept[0] + cute.arch.shuffle_sync_bfly(kept[0], 2)]
        scores = []
        for r in range(0, self.rows, 2):
            odd = (lane & 2) != 0
            sent = cute.arch.shuffle_sync_bfly(select(odd, kept[r], kept[r + 1]), 2)
            scores += [select(odd, kept[r + 1], kept[r]) + sent] * 2
        return scores

    @cute.jit
    def store(self, arguments, policy, tile, row, column, lengths, scores, warp, lane):
        key = self.key(tile, warp, lane)
        position = column * self.page_size + key
        odd = (lane >> 1) & 1
        for r in cutlass.range_constexpr(0, self.rows, 2):
            length, own_row = lengths[r], row + r
            is_stored = key < self.page_size
            if cutlass.const_expr(self.rows > 1):
                length = select(odd, lengths[r + 1], length)
                own_row = own_row + odd
                is_stored = is_stored & (length >= 0)
            else:
                is_stored = is_stored & (odd == 0)
            score = select(position < length, scores[r], Float32(NEGATIVE_INFINITY))
            if is_stored:
                index = Int64(own_row) * self.limit(arguments) + position
                ptx.store_global_f32(arguments.scores + index * 4, score, policy)

    @cute.jit
    def fill(self, arguments, warp, warps, lane):
        """-inf behind the last page that a group's rows have; a piece of a row to each warp in
        turn."""
        limit = self.limit(arguments)
        pieces = divide(limit + (FILL - 1), FILL)
        word = arithmetic.bits(Float32(NEGATIVE_INFINITY))
        for piece in cutlass.range(warp, arguments.batch * pieces, warps):
            row = divide(piece, pieces)
            first = (piece - row * pieces) * FILL
            sequence = divide(row, arguments.rows_per_sequence)
            within = row - sequence * arguments.rows_per_sequence
            group = sequence * arguments.groups_per_sequence + divide(within, self.rows)
            _, first_row, count = rows_of(arguments, group, self.rows)
            words = load_lengths(arguments, first_row, count, self.rows)
            longest = longest_of(arguments, words, limit)
            end = divide(longest + (self.page_size - 1), self.page_size) * self.page_size
            target = arguments.scores + Int64(row) * limit * 4
            for i in cutlass.range(lane * 4, FILL, 128, unroll=8):
                position = first + i
                if (position >= end) & (position < limit):
                    ptx.store_global_16b(target + Int64(position) * 4, (word,) * 4)


def lengths_exceed(lengths, limit):
    longest = lengths[0]
    for length in lengths[1:]:
        longest = cutlass.max(longest, length)
    return longest > limit


@dsl_user_op
def map_address(atom, *, loc=None, ip=None):
    """The address of a tensor map that is a kernel parameter."""
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    executable = cute_nvgpu.atom_make_exec_tma(atom._trait.value, loc=loc, ip=ip)
    address = cute_nvgpu.get_tma_desc_addr(pointer, executable, loc=loc, ip=ip)
    integer = ir.IntegerType.get_signless(64)
    return Int64(cute_nvgpu.cast_tma_desc_to_integer(integer, address.value, loc=loc, ip=ip))


def power_of_two(exponent):
    """The bits of 2**(exponent - 127); NaN for 255."""
    is_special = ((exponent + 1) & 0xFF) < 2  # 2**-127 is subnormal
    return (exponent << 23) | select(is_special, Uint32(0x400000), Uint32(0))
