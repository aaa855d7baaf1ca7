// Helpers wait for a call, join it while it is open, and leave. They spin for as long as the next
// call of an iteration usually takes to come, then sleep.
#include "team.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace inflight {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds spin_time{50};

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spins until `ready()`, or until the spinning has taken too long: then false.
template <class Ready>
bool spin_until(const Ready& ready) {
    constexpr int pauses_between_looks = 16;  // at the clock
    const auto end = Clock::now() + spin_time;
    do {
        for (int i = 0; i < pauses_between_looks; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (Clock::now() < end);
    return ready();
}

// Waiting that spins first, and costs who wakes nothing while nobody sleeps.
class Waiting {
public:
    template <class Ready>
    void until(const Ready& ready) {
        if (spin_until(ready)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        ++sleeping_;
        changed_.wait(lock, ready);
        --sleeping_;
    }

    // To be called after what `ready` reads has changed, sequentially consistent.
    void wake() {
        if (sleeping_ == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int> sleeping_{0};
};

class Team {
public:
    void run(int size, void (*body)(void*, int), void* context) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner.owns_lock()) return body(context, 0);
        hire(size - 1);
        body_ = body;
        context_ = context;
        size_ = size;
        inside_ = open;
        ++call_;
        for_call_.wake();
        body(context, 0);
        inside_ &= ~open;
        for_leavers_.until([this] { return inside_ == 0; });
    }

private:
    // Of `inside_`: a flag beside the number of helpers in the body.
    static constexpr uint32_t open = 1u << 31;

    void hire(int count) {
        // A helper that cannot be had is done without.
        while (num_helpers_ < count && start(num_helpers_ + 1)) ++num_helpers_;
    }

    bool start(int member) {
        // Signals are for the threads of the program that loaded us.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            std::thread([this, member, seen = call_.load()] { help(member, seen); }).detach();
        } catch (const std::system_error&) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    [[noreturn]] void help(int member, uint64_t seen) {
        for (;;) {
            for_call_.until([&] { return call_ != seen; });
            seen = call_;
            if (!join()) continue;
            if (member < size_) body_(context_, member);
            if (--inside_ == 0) for_leavers_.wake();
        }
    }

    bool join() {
        uint32_t now = inside_;
        while (now & open)
            if (inside_.compare_exchange_weak(now, now + 1)) return true;
        return false;
    }

    std::mutex owner_;  // of the helpers, and of all below
    int num_helpers_ = 0;
    // Written while no helper is inside, read by those that are.
    void (*body_)(void*, int) = nullptr;
    void* context_ = nullptr;
    int size_ = 0;
    alignas(64) std::atomic<uint64_t> call_{0};
    alignas(64) std::atomic<uint32_t> inside_{0};
    Waiting for_call_, for_leavers_;
};

// Never destroyed: helpers may outlive whatever the end of the process destroys.
std::atomic<Team*> the_team{new Team};

// The child of a fork has no helpers, and locks may have been held.
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { the_team = new Team; });

}  // namespace

void run_team(int size, void (*body)(void*, int), void* context) {
    the_team.load()->run(size, body, context);
}

}  // namespace inflight
