// Multiplies bytes as fast as all threads can, with the instructions of the CPU that this is compiled
// for: the rate that bounds contexts with weights of 8 and 4 bits.
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512VNNI__)
using Bytes = __m512i;
inline Bytes add_products(Bytes sums, Bytes x, Bytes y) { return _mm512_dpbusd_epi32(sums, x, y); }
#elif defined(__AVX512BW__)
using Bytes = __m512i;
// Sums of 16 bits, which weights of 4 bits allow for a while: no way is faster.
inline Bytes add_products(Bytes sums, Bytes x, Bytes y) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16(x, y));
}
#elif defined(__AVXVNNI__)
using Bytes = __m256i;
inline Bytes add_products(Bytes sums, Bytes x, Bytes y) {
  return _mm256_dpbusd_avx_epi32(sums, x, y);
}
#elif defined(__AVX2__)
using Bytes = __m256i;
inline Bytes add_products(Bytes sums, Bytes x, Bytes y) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(x, y));
}
#endif

// Sums that do not wait for each other: as many as an instruction takes cycles, for two a cycle.
constexpr int kChains = 10;

}  // namespace

extern "C" {

// Multiplications and additions of one call; 0: nothing is known of this CPU's instructions.
std::int64_t num_operations(std::int64_t steps, int threads) {
#ifdef __AVX2__
  return steps * threads * kChains * 2 * static_cast<std::int64_t>(sizeof(Bytes));
#else
  return 0;
#endif
}

void multiply_bytes(std::int64_t steps, int threads) {
#ifdef __AVX2__
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int thread = 0; thread < threads; ++thread) {
    Bytes sums[kChains] = {}, x = Bytes{} + 0x0102030405060708, y = x;
    for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 16
      for (Bytes& sum : sums) {
        // The compiler cannot know that these stay what they were, and multiplies each time.
        asm volatile("" : "+x"(x), "+x"(y));
        sum = add_products(sum, x, y);
      }
    }
    for (Bytes& sum : sums) asm volatile("" : : "x"(sum));
  }
#endif
}
}
