// The thread team: everybody who comes takes part, nobody is waited for who has not come.
//
// A body takes its work piece by piece from a counter that all members share, until none is left.
// The caller is a member, so the work gets done even if no other thread finds a core: a helper that
// comes late finds the call closed and stays out. What may have to be waited for is the piece that
// a helper is at. OpenMP's teams wait for every thread at every barrier, and on cores that others
// use too each barrier then costs the milliseconds until the last one is scheduled.
//
// Calls from several threads at once are well: one has the helpers, the others work alone. In a
// process that was forked the team starts anew.
#pragma once

#include <atomic>
#include <cstdint>

#include "dispatch.h"

namespace inflight {

// Calls body(context, member) from the calling thread (member 0) and from up to `size` - 1 helpers
// (other members below `size`), each at most once, and returns when all who came are done. What the
// caller wrote before is seen by the body, what the body wrote is seen after.
void run_team(int size, void (*body)(void* context, int member), void* context);

template <class Body>
void with_team(int size, const Body& body) {
    if (size <= 1) return body(0);
    const auto call = [](void* context, int member) {
        (*static_cast<const Body*>(context))(member);
    };
    run_team(size, call, const_cast<Body*>(&body));
}

// The numbers 0..count-1, handed out in runs: the first are long, so that a member reads on where
// it was, and they shrink to single ones, so that all end together.
class Pieces {
public:
    struct Run {
        int64_t first, last;  // none where first == last

        bool empty() const { return first == last; }
    };

    // A run is what is left / `share`, at least 1.
    Pieces(int64_t count, int64_t share) : count_(count), share_(share) {}

    Run take() {
        int64_t first = next_.load(std::memory_order_relaxed), last;
        do {
            const int64_t left = count_ - first;
            last = first + (left > share_ ? left / share_ : left > 0 ? 1 : 0);
        } while (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed));
        return {first, last};
    }

private:
    const int64_t count_, share_;
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace inflight
