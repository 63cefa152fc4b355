// Simulates how many threads share the forward part of an attention: with kernel/schedule.hpp, and with times that are
// computed, because the machine at hand has few processors.
//
//   simulate_schedule < CASES
//
// A line of CASES is "batch heads key_heads rows keys band workers". `band` is the number of keys that a row sees, its own
// included: 0 for all keys, -1 for all keys up to the row's own. It prints for each line how many tasks there were, and
// which share of the workers' time was idle, in percent.
#include <memory>
#include <queue>
#include <vector>

#include "../kernel/schedule.hpp"
#include "schedule_cases.hpp"

namespace fa::FA_ISA {

// What a task takes besides its pairs: copying keys and values for the products takes as long as so many more rows. Measured
// with AVX-512: tiles of 96 rows take 3 % more time than tiles of 224.
constexpr double kCopiedRows = 5;

struct Result {
  int64_t tasks;
  double idle;
};

static double time_of(const HeadPlan& plan, Units units, int64_t group) {
  double pairs = 0;
  for (int64_t n = 0; n < units.count; ++n) pairs += static_cast<double>(plan.pairs(units.first + n, group));
  const RowRange rows = plan.rows(units, group);
  return pairs * (1 + kCopiedRows / static_cast<double>(rows.count()));
}

// Each worker takes its tasks as Driver::work() does. The worker that is free first takes the next one.
static Result simulate(std::vector<HeadPlan>& plans, int64_t group, int64_t workers) {
  std::vector<int64_t> ends(plans.size());
  const auto count = static_cast<int64_t>(plans.size());
  const auto schedule = std::make_unique<Schedule>(plans.data(), ends.data(), count, group, workers);
  schedule->expect(schedule->workers());
  using Free = std::pair<double, int64_t>;  // since when, and which worker
  std::priority_queue<Free, std::vector<Free>, std::greater<>> free;
  double busy = 0, end = 0;
  int64_t tasks = 0;
  const auto part_of = [&](int64_t worker) { return schedule->part_of(static_cast<size_t>(worker)); };
  const auto run = [&](double start, int64_t worker, int64_t task) {
    schedule->reserve(worker, part_of(worker));
    Units units = Schedule::units_of(task);
    const HeadPlan& plan = schedule->plan_of(units.first);
    const double time = time_of(plan, units, group);
    busy += time;
    end = std::max(end, start + time);
    ++tasks;
    free.push({start + time, worker});
  };
  for (int64_t n = 0; n < schedule->workers(); ++n) {
    const int64_t task = schedule->take_any(part_of(n));
    if (task != Schedule::kNone) run(0, schedule->arrive(), task);
  }
  while (!free.empty()) {
    const auto [time, worker] = free.top();
    free.pop();
    const int64_t task = schedule->take(worker, part_of(worker));
    if (task != Schedule::kNone) run(time, worker, task);
  }
  return {tasks, 1 - busy / (end * static_cast<double>(workers))};
}

}  // namespace fa::FA_ISA

int main() {
  using namespace fa::FA_ISA;
  fa::check::ScheduleCase given;
  while (fa::check::read_case(given)) {
    std::vector<HeadPlan> plans;
    for (int64_t n = 0; n < given.batch * given.key_heads; ++n) {
      plans.emplace_back(given.sequence, n % given.key_heads, given.group(), given.batch * given.key_heads, true);
    }
    const Result result = simulate(plans, given.group(), given.workers);
    fa::check::print_idle(result.tasks, result.idle);
  }
  return 0;
}
