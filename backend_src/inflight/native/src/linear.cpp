// The driver of all linears: prepares the rows, shares the panels among the threads, and calls the
// kernels of the chosen instruction set.
//
// A task is one panel (two of a gate and up) for one chunk of rows, chosen so that the rows stay in
// the second-level cache while panel after panel is read. Threads take tasks as they come free: a
// core that other work slows down holds nobody up.
#include "linear.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "dispatch.h"

namespace inflight {
namespace {

constexpr int64_t most_chunk_rows = 512, least_chunk_rows = 64;
constexpr int64_t chunk_bytes = 1 << 20;
constexpr int64_t tasks_per_thread = 4;
constexpr int64_t grain_bytes = 64 << 10;  // weights that a thread takes at once, at least
constexpr int64_t alignment = 64;
constexpr int64_t serial_rows = 4;  // fewer rows are prepared before the team starts

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Memory of one thread that grows to the largest size asked for and is then reused.
class Scratch {
public:
    uint8_t* at_least(int64_t size) {
        if (size > size_) {
            memory_.reset();
            memory_.reset(static_cast<uint8_t*>(::operator new(size, std::align_val_t{alignment})));
            size_ = size;
        }
        return memory_.get();
    }

private:
    struct Delete {
        void operator()(uint8_t* memory) { ::operator delete(memory, std::align_val_t{alignment}); }
    };
    std::unique_ptr<uint8_t, Delete> memory_;
    int64_t size_ = 0;
};

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
        const bool prepared = rows_.values == x_.values;
        const bool serial = x_.num_rows < serial_rows;
        if (!prepared && serial) prepare(0, x_.num_rows);
        const int64_t num_tasks = num_chunks() * weights_.num_tasks;
        const int64_t grain = choose_grain(num_tasks);
#pragma omp parallel num_threads(team_size())
        {
            if (!prepared && !serial) {
#pragma omp for schedule(static)
                for (int64_t row = 0; row < x_.num_rows; ++row) prepare(row, row + 1);
            }
            Output output = own_output();
            if (route_.begin) route_.begin();
#pragma omp for schedule(monotonic : dynamic, grain) nowait
            for (int64_t task = 0; task < num_tasks; ++task)
                compute(output, task / weights_.num_tasks, task % weights_.num_tasks);
            if (route_.end) route_.end();
            if (output.finish == Finish::argmax) {
#pragma omp critical(inflight_argmax)
                merge_best(output);
            }
        }
    }

private:
    Route choose_route() const {
        const int kind = int(weights_.kind);
        const bool many = x_.num_rows >= kernels_.many_from[kind];
        return many ? kernels_.many[kind] : kernels_.few[kind];
    }

    // Where the prepared rows lie: x itself where nothing is to be prepared, else the scratch of
    // the calling thread. What is there beyond the last row of x is of no account.
    Rows place_rows() const {
        Rows rows{route_.form, weights_.k, nullptr, nullptr, nullptr, nullptr};
        const int64_t num_rows = round_up(x_.num_rows, route_.row_unit);
        if (x_.are(route_.form, weights_.k) && num_rows == x_.num_rows) {
            rows.values = static_cast<uint8_t*>(const_cast<void*>(x_.values));  // only read
            return rows;
        }
        static thread_local Scratch scratch;
        const int64_t values = num_rows * weights_.k * value_bytes(route_.form);
        const int64_t groups = route_.form == Form::int8 ? num_rows * (weights_.k / group_size) : 0;
        rows.values = scratch.at_least(values + 12 * groups);
        rows.scales = reinterpret_cast<float*>(rows.values + values);
        rows.scaled_sums = rows.scales + groups;
        rows.sums = reinterpret_cast<int32_t*>(rows.scaled_sums + groups);
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

    int64_t choose_grain(int64_t num_tasks) const {
        const int64_t task_bytes = weights_.panels_per_task * weights_.panel_bytes();
        const int64_t enough = (grain_bytes + task_bytes - 1) / task_bytes;
        const int64_t fair = num_tasks / (tasks_per_thread * team_size());
        return std::clamp<int64_t>(fair, 1, enough);
    }

    void prepare(int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; ++row)
            kernels_.prepare(x_.number, x_.row(row), x_.k, rows_from(rows_, row));
    }

    void compute(const Output& output, int64_t chunk, int64_t task) const {
        const int64_t first_panel = task * weights_.panels_per_task;
        const uint8_t* panels[2];
        for (int64_t i = 0; i < weights_.panels_per_task; ++i)
            panels[i] = usable_panel(first_panel + i, i);
        const int64_t end = std::min((chunk + 1) * chunk_rows_, x_.num_rows);
        for (int64_t row = chunk * chunk_rows_; row < end; row += route_.block_rows) {
            alignas(alignment) float tiles[2 * most_block_rows * panel_columns];
            const Place place{row, std::min(route_.block_rows, end - row), first_panel};
            for (int64_t i = 0; i < weights_.panels_per_task; ++i)
                route_.product(rows_from(rows_, row), place.num_rows, panels[i],
                               tiles + i * most_block_rows * panel_columns);
            kernels_.finish(output, place, tiles);
        }
    }

    const uint8_t* usable_panel(int64_t index, int64_t slot) const {
        static thread_local Scratch expanded;
        const uint8_t* panel = weights_.panel(index);
        if (!route_.expand) return panel;
        const int64_t size = weights_.k * panel_columns * 2;
        uint8_t* target = expanded.at_least(weights_.panels_per_task * size) + slot * size;
        route_.expand(panel, weights_.k, target);
        return target;
    }

    // Each thread looks for its own largest value.
    Output own_output() const {
        Output output = output_;
        if (output.finish != Finish::argmax) return output;
        static thread_local Scratch scratch;
        output.best = reinterpret_cast<float*>(scratch.at_least(x_.num_rows * 8));
        output.best_ids = reinterpret_cast<int32_t*>(output.best + x_.num_rows);
        start_best(output.best, output.best_ids, x_.num_rows);
        return output;
    }

    void merge_best(const Output& own) const {
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
    static thread_local Scratch scratch;
    auto* best = reinterpret_cast<float*>(scratch.at_least(num_rows * int64_t(sizeof(float))));
    start_best(best, ids, num_rows);
    const Output output{Finish::argmax, Number::f32, nullptr, packed->columns,
                        packed->bias,   best,        ids};
    Linear(Weights(*packed), {Number(x_number), x, num_rows, packed->k}, output).run();
}
