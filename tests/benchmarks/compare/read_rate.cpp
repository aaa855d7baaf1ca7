// Reads memory as fast as all threads can: the rate that bounds a generation step at batch 1.
#include <cstdint>

extern "C" {

// The sum of `count` numbers, a multiple of 32 for each thread; only there so that they are read.
std::int64_t sum_of(const std::int64_t* numbers, std::int64_t count, int threads) {
  typedef std::int64_t Lanes __attribute__((vector_size(64)));
  constexpr std::int64_t kStride = 4 * sizeof(Lanes) / sizeof(std::int64_t);
  const std::int64_t steps = count / kStride;
  std::int64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (int thread = 0; thread < threads; ++thread) {
    Lanes sums[4] = {};
    const std::int64_t last = steps * (thread + 1) / threads;
    for (std::int64_t step = steps * thread / threads; step < last; ++step) {
      const Lanes* at = reinterpret_cast<const Lanes*>(numbers + step * kStride);
      for (int lane = 0; lane < 4; ++lane) sums[lane] += at[lane];
    }
    const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (unsigned i = 0; i < sizeof(Lanes) / sizeof(std::int64_t); ++i) total += all[i];
  }
  return total;
}
}
