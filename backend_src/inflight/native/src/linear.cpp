// The driver of all linears: prepares the rows, shares the panels among the threads, and calls the
// kernels of the chosen instruction set.
//
// A task is one panel (two of a gate and up) for one chunk of rows, chosen so that the rows stay in
// the second-level cache while panel after panel is read. Threads take tasks as they come free: a
// core that other work slows down holds nobody up.
#include "linear.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>

#include "dispatch.h"
#include "team.h"
#include "workspace.h"

namespace inflight {
namespace {

constexpr int64_t most_chunk_rows = 512, least_chunk_rows = 64;
constexpr int64_t chunk_bytes = 1 << 20;
constexpr int64_t tasks_per_thread = 4;
constexpr int64_t serial_values = 8192;  // fewer values of x are prepared before the team starts
constexpr int64_t alignment = 64, line = 64;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

const LinearKernels& chosen_kernels() {
    const Versions<const LinearKernels*> versions{
        &linear_kernels_portable,
        INFLIGHT_IF_AVX2(&linear_kernels_avx2),
        INFLIGHT_IF_AVX512(&linear_kernels_avx512),
        INFLIGHT_IF_AMX(&linear_kernels_amx),
    };
    return *versions.chosen();
}

void start_best(float* best, int32_t* best_ids, int64_t num_rows) {
    std::fill_n(best, num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(best_ids, num_rows, 0);
}

// PackedLinear as it is called from Python; the fields are those of packed.py.
struct PackedLinear {
    const uint8_t* panels;
    const float* bias;
    int64_t kind;
    int64_t columns;  // of y
    int64_t k;
    int64_t panels_per_task;  // 2 for a gate and up
};

struct Weights {
    WeightKind kind;
    const uint8_t* panels;
    int64_t k;  // padded
    int64_t panels_per_task, num_tasks;

    explicit Weights(const PackedLinear& packed)
        : kind(WeightKind(packed.kind)),
          panels(packed.panels),
          k(round_up(packed.k, group_size)),
          panels_per_task(packed.panels_per_task),
          num_tasks(round_up(packed.columns, panel_columns) / panel_columns) {}

    int64_t panel_bytes() const { return k / group_size * group_bytes(kind); }
    const uint8_t* panel(int64_t index) const { return panels + index * panel_bytes(); }
};

struct Activations {
    Number number;
    const void* values;  // [num_rows][k]
    int64_t num_rows, k;

    const void* row(int64_t index) const {
        const int64_t bytes = k * (number == Number::f32 ? 4 : 2);
        return static_cast<const uint8_t*>(values) + index * bytes;
    }
    bool are(Form form, int64_t padded_k) const {
        const Form own = number == Number::f32 ? Form::f32 : Form::bf16;
        return own == form && k == padded_k;
    }
};

// One call: everything that the threads share.
class Linear {
public:
    Linear(const Weights& weights, const Activations& x, const Output& output)
        : kernels_(chosen_kernels()), weights_(weights), x_(x), output_(output),
          route_(choose_route()), rows_(place_rows()), chunk_rows_(choose_chunk()) {}

    void run() {
        prepare_rows();
        const int64_t num_groups = num_groups_at_once();
        Pieces groups(num_groups, 2 * team_size());
        const int64_t num_grouped = num_groups * tasks_at_once();
        Pieces tasks(num_chunks() * weights_.num_tasks - num_grouped, 2 * team_size());
        with_team(team_size(), [&](int) {
            const Output output = own_output();
            if (route_.begin) route_.begin();
            for (Pieces::Run run; !(run = groups.take()).empty();)
                for (int64_t group = run.first; group < run.last; ++group)
                    compute_at_once(output, group * tasks_at_once());
            compute_all(tasks, num_grouped, output);
            if (route_.end) route_.end();
            if (output.finish == Finish::argmax) merge_best(output);
        });
    }

private:
    Route choose_route() const {
        const int kind = int(weights_.kind);
        if (x_.num_rows >= kernels_.many_from[kind]) return kernels_.many[kind];
        if (x_.num_rows >= kernels_.some_from[kind]) return kernels_.some[kind];
        return kernels_.few[kind];
    }

    // Where the prepared rows lie: x itself where nothing is to be prepared, else memory of the
    // calling thread. What is there beyond the last row of x is of no account.
    Rows place_rows() const {
        Rows rows{route_.form, weights_.k, nullptr, nullptr, nullptr, nullptr, 0};
        const int64_t num_rows = round_up(x_.num_rows, route_.row_unit);
        if (x_.are(route_.form, weights_.k) && num_rows == x_.num_rows) {
            rows.values = static_cast<uint8_t*>(const_cast<void*>(x_.values));  // only read
            return rows;
        }
        static thread_local Workspace workspace;
        const int64_t values = num_rows * weights_.k * value_bytes(route_.form);
        rows.scale_stride = route_.form == Form::int8 ? num_rows : 0;
        const int64_t scales = rows.scale_stride * (weights_.k / group_size);
        rows.values = workspace.at_least(values + 12 * scales);
        rows.scales = reinterpret_cast<float*>(rows.values + values);
        rows.scaled_sums = rows.scales + scales;
        rows.sums = reinterpret_cast<int32_t*>(rows.scaled_sums + scales);
        return rows;
    }

    int64_t choose_chunk() const {
        const int64_t row_bytes = weights_.k * value_bytes(route_.form);
        int64_t rows = std::clamp(chunk_bytes / row_bytes, least_chunk_rows, most_chunk_rows);
        const auto chunks_of = [&](int64_t size) { return (x_.num_rows + size - 1) / size; };
        while (rows > least_chunk_rows &&
               chunks_of(rows) * weights_.num_tasks < tasks_per_thread * team_size())
            rows /= 2;
        const int64_t even = (x_.num_rows + chunks_of(rows) - 1) / chunks_of(rows);
        return round_up(even, route_.block_rows);
    }

    int64_t num_chunks() const { return (x_.num_rows + chunk_rows_ - 1) / chunk_rows_; }

    void prepare_rows() const {
        if (rows_.values == x_.values) return;
        const int team = x_.num_rows * weights_.k <= serial_values ? 1 : team_size();
        Pieces rows(x_.num_rows, 2 * team);
        with_team(team, [&](int) {
            for (Pieces::Run run; !(run = rows.take()).empty();)
                for (int64_t row = run.first; row < run.last; ++row)
                    kernels_.prepare(x_.number, x_.row(row), x_.k, rows_from(rows_, row));
        });
    }

    int64_t tasks_at_once() const { return panels_at_once / weights_.panels_per_task; }

    // Groups of tasks whose panels one row meets at once; as many for each thread. They are the
    // first ones, and what is left is so little that all threads end together.
    int64_t num_groups_at_once() const {
        if (!route_.at_once || x_.num_rows != 1) return 0;
        return weights_.num_tasks / tasks_at_once() / team_size() * team_size();
    }

    void compute_at_once(const Output& output, int64_t first_task) const {
        alignas(alignment) float tiles[panels_at_once * tile_floats];
        const int64_t first_panel = first_panel_of(first_task), step = weights_.panels_per_task;
        route_.at_once(rows_, weights_.panel(first_panel), weights_.panel_bytes(), tiles);
        for (int64_t i = 0; i < panels_at_once; i += step)
            kernels_.finish(output, {0, 1, first_panel + i}, tiles + i * tile_floats);
    }

    // The tasks from `first` on. A thread takes its next run of tasks with the last of this one
    // still to do: what it reads next is known while it computes.
    void compute_all(Pieces& tasks, int64_t first, const Output& output) const {
        for (Pieces::Run run = tasks.take(); !run.empty();) {
            const int64_t task = first + run.first++;
            if (run.empty()) run = tasks.take();
            std::optional<int64_t> next_task;
            if (!run.empty()) next_task = first + run.first;
            compute(output, task, next_task);
        }
    }

    void compute(const Output& output, int64_t task, std::optional<int64_t> next_task) const {
        const int64_t chunk = task / weights_.num_tasks;
        const int64_t begin = chunk * chunk_rows_;
        const int64_t end = std::min(begin + chunk_rows_, x_.num_rows);
        const int64_t first_panel = first_panel_of(task), rows = end - begin;
        const bool reads_once = rows <= route_.block_rows && !route_.by_shares;
        for (int64_t row = begin; row < end; row += route_.block_rows) {
            const Place place{row, std::min(route_.block_rows, end - row), first_panel};
            alignas(alignment) float tiles[2 * tile_floats];
            for (int64_t i = 0; i < weights_.panels_per_task; ++i) {
                const Panel panel{weights_.panel(first_panel + i), memory_to_expand(i), row > begin,
                                  reads_once ? fetching_on(first_panel + i, i, next_task)
                                             : fetching_share(i, next_task, {row - begin, rows})};
                route_.product(rows_from(rows_, row), place.num_rows, panel,
                               tiles + i * tile_floats);
            }
            kernels_.finish(output, place, tiles);
        }
    }

    int64_t first_panel_of(int64_t task) const {
        return task % weights_.num_tasks * weights_.panels_per_task;
    }

    // Of one of a task's panels.
    uint8_t* memory_to_expand(int64_t place_in_task) const {
        if (!route_.expands) return nullptr;
        static thread_local Workspace workspace;
        const int64_t bytes = weights_.k / group_size * group_bytes(WeightKind::bf16);
        return workspace.at_least(weights_.panels_per_task * bytes) + place_in_task * bytes;
    }

    // Of a panel that is read only once: what is some way in front, also where that is in the panel
    // that is read after it.
    Fetching fetching_on(int64_t panel, int64_t place_in_task,
                         std::optional<int64_t> next_task) const {
        const int64_t distance = route_.lead;
        const bool is_last = place_in_task + 1 == weights_.panels_per_task;
        const int64_t after = is_last && next_task ? first_panel_of(*next_task) : panel + 1;
        const int64_t bytes = weights_.panel_bytes(), step = bytes / (weights_.k / group_size);
        const uint8_t *then = weights_.panel(after), *end = weights_.panel(panel) + bytes;
        if (bytes <= distance) return {step, then, then + bytes, then};
        return {step, weights_.panel(panel) + distance, end, then};
    }

    struct Share {
        int64_t first_row, num_rows;
    };

    // Of a panel that block after block of rows meets: the block's share of the next task's panel.
    Fetching fetching_share(int64_t place_in_task, std::optional<int64_t> next_task,
                            Share share) const {
        if (!next_task) return {};
        const int64_t groups = weights_.k / group_size, bytes = weights_.panel_bytes();
        const int64_t blocks = (share.num_rows + route_.block_rows - 1) / route_.block_rows;
        const int64_t step = round_up((bytes + groups * blocks - 1) / (groups * blocks), line);
        const int64_t first = share.first_row / route_.block_rows * groups * step;
        const uint8_t* next = weights_.panel(first_panel_of(*next_task) + place_in_task);
        if (first >= bytes) return {};
        return {step, next + first, next + bytes, next};
    }

    // Each thread looks for its own largest value.
    Output own_output() const {
        Output output = output_;
        if (output.finish != Finish::argmax) return output;
        static thread_local Workspace workspace;
        output.best = reinterpret_cast<float*>(workspace.at_least(x_.num_rows * 8));
        output.best_ids = reinterpret_cast<int32_t*>(output.best + x_.num_rows);
        start_best(output.best, output.best_ids, x_.num_rows);
        return output;
    }

    void merge_best(const Output& own) {
        const std::lock_guard<std::mutex> lock(merging_);
        for (int64_t row = 0; row < x_.num_rows; ++row) {
            const bool larger = own.best[row] > output_.best[row];
            const bool same_and_lower =
                own.best[row] == output_.best[row] && own.best_ids[row] < output_.best_ids[row];
            if (!larger && !same_and_lower) continue;
            output_.best[row] = own.best[row];
            output_.best_ids[row] = own.best_ids[row];
        }
    }

    const LinearKernels& kernels_;
    const Weights weights_;
    const Activations x_;
    const Output output_;
    const Route route_;
    const Rows rows_;
    const int64_t chunk_rows_;
    std::mutex merging_;
};

}  // namespace
}  // namespace inflight

using namespace inflight;

// y [num_rows][columns] from x [num_rows][k]. `how` is 4 * finish + 2 * number of x + number of y;
// any finish but argmax.
INFLIGHT_API void inflight_linear(const PackedLinear* packed, const void* x, int64_t num_rows,
                                  void* y, int64_t how) {
    if (num_rows == 0) return;
    const Output output{Finish(how / 4), Number(how % 2), y,      packed->columns,
                        packed->bias,    nullptr,         nullptr};
    Linear(Weights(*packed), {Number(how / 2 % 2), x, num_rows, packed->k}, output).run();
}

// ids [num_rows] = the column of each row's largest value, the lowest of equal ones.
INFLIGHT_API void inflight_linear_argmax(const PackedLinear* packed, const void* x,
                                         int64_t num_rows, int64_t x_number, int32_t* ids) {
    if (num_rows == 0) return;
    static thread_local Workspace workspace;
    auto* best = reinterpret_cast<float*>(workspace.at_least(num_rows * int64_t(sizeof(float))));
    start_best(best, ids, num_rows);
    const Output output{Finish::argmax, Number::f32, nullptr, packed->columns,
                        packed->bias,   best,        ids};
    Linear(Weights(*packed), {Number(x_number), x, num_rows, packed->k}, output).run();
}
