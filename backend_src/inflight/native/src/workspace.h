// Memory that grows to the largest size asked for and is then reused. For files that are compiled
// for any machine.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace inflight {

class Workspace {
public:
    // At a multiple of 64 bytes; what was there before may be lost.
    uint8_t* at_least(int64_t size) {
        if (size > size_) {
            memory_.reset();
            size_ = 0;
            memory_.reset(static_cast<uint8_t*>(::operator new(size, alignment)));
            size_ = size;
        }
        return memory_.get();
    }

private:
    static constexpr std::align_val_t alignment{64};
    struct Delete {
        void operator()(uint8_t* memory) { ::operator delete(memory, alignment); }
    };
    std::unique_ptr<uint8_t, Delete> memory_;
    int64_t size_ = 0;
};

}  // namespace inflight
