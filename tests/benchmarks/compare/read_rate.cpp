// Reads memory as fast as all threads can: the rate that bounds a generation step at batch 1.
#include <cstdint>

extern "C" {

// The sum of one number of each cache line, since a line comes whole; only there so that lines are
// read. A thread reads several streams at once, because of one alone a core fetches too little ahead.
// What is left over when the lines do not divide evenly is not read.
std::int64_t sum_of_lines(const std::int64_t* numbers, std::int64_t count, int threads) {
  constexpr std::int64_t kLine = 64 / sizeof(std::int64_t);
  constexpr std::int64_t kStreams = 8;
  const std::int64_t length = count / kLine / (threads * kStreams) * kLine;
  std::int64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
  for (int thread = 0; thread < threads; ++thread) {
    const std::int64_t* first = numbers + thread * kStreams * length;
    for (std::int64_t at = 0; at < length; at += kLine) {
      for (int stream = 0; stream < kStreams; ++stream) total += first[stream * length + at];
    }
  }
  return total;
}
}
