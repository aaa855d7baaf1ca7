#define INFLIGHT_ISA portable
#include "sampling_kernels.h"
