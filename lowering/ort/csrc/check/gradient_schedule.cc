// Simulates how many threads share the gradient of an attention: with kernel/gradient/schedule.hpp, and with times that are
// computed, because the machine at hand has few processors.
//
//   simulate_gradient_schedule < CASES
//
// A line of CASES is "batch heads key_heads rows keys band workers", as for schedule.cc. It prints for each line how many tasks
// there were, and which share of the workers' time was lost, in percent: they were idle, or did what one worker alone would
// not have to do.
#include <algorithm>
#include <queue>
#include <vector>

#include "../kernel/gradient/schedule.hpp"
#include "schedule_cases.hpp"

namespace fa::FA_ISA::grad {

// What a task takes besides its pairs of a row and a key, in pairs. Measured with AVX-512: where 64 threads share 12 key heads
// of 1024 keys under a causal mask, one split for each span, the sum of all times is 11 % more than with one thread.
constexpr double kPackedRow = 12;  // copying a query row, its dO, and its result
constexpr double kPackedKey = 5;
constexpr double kSummedRow = 3;  // clearing a row's sums of dQ of one span, and adding them to the others

struct Result {
  int64_t tasks = 0;
  double busy = 0;
  double end = 0;

  double lost(double alone, int64_t workers) const { return 1 - alone / (end * static_cast<double>(workers)); }
};

static double rows_of_span(const KeyHeadPlan& plan, const QueryChunk& chunk, int64_t span) {
  double rows = 0;
  for (int64_t r = 0; r < chunk.per_head(); ++r) {
    const KeyRange seen = band_range(*plan.sequence, chunk.begin + r, chunk.begin + r);
    const int64_t first = span * plan.span_blocks * plan.block_keys;
    rows += seen.begin < first + plan.span_blocks * plan.block_keys && first < seen.end;
  }
  return rows > 0 ? static_cast<double>(chunk.rows()) : 0;
}

// A split of a key head with one chunk of query rows.
static double time_of(const KeyHeadPlan& plan, int64_t split, const QueryChunk& chunk, bool shared) {
  double time = 0;
  std::vector<bool> packed(kChunkBlocks);
  plan.each_span(split, [&](int64_t span) {
    if (shared) time += kSummedRow / 2 * rows_of_span(plan, chunk, span);
    plan.each_block(span, [&](int64_t first, int64_t keys) {
      double pairs = 0;
      for (int64_t r = 0; r < chunk.rows(); ++r) {
        const int64_t i = chunk.index_of(r);
        const KeyRange seen = band_range(*plan.sequence, i, i);
        const int64_t count = std::min(first + keys, seen.end) - std::max(first, seen.begin);
        if (count <= 0) continue;
        pairs += static_cast<double>(count);
        const int64_t block = r / chunk.block_rows();
        if (!packed[block]) time += kPackedRow * static_cast<double>(std::min(chunk.block_rows(), chunk.rows()));
        packed[block] = true;
      }
      if (pairs > 0) time += pairs + kPackedKey * static_cast<double>(keys);
    });
  });
  return time;
}

static double time_of_head(const KeyHeadPlan& plan) {
  double time = 0;
  for (int64_t n = 0; n < plan.chunks; ++n) time += time_of(plan, 0, plan.chunk(n), false);
  return time;
}

// The worker that is free first takes the next task. The next tasks begin when all of these have ended.
static void run_parallel(const std::vector<double>& tasks, int64_t workers, Result& result) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free;  // since when
  for (int64_t n = 0; n < workers; ++n) free.push(result.end);
  double end = result.end;
  for (double time : tasks) {
    const double start = free.top();
    free.pop();
    free.push(start + time);
    end = std::max(end, start + time);
    result.busy += time;
  }
  result.tasks += static_cast<int64_t>(tasks.size());
  result.end = end;
}

static Result simulate(const Sequence* sequences, int64_t count, int64_t key_heads, int64_t group, int64_t workers) {
  Schedule schedule(sequences, count, key_heads, group);
  schedule.expect(workers);
  int64_t shared_count = 0;
  schedule.each([&](const KeyHeadPlan&, bool shared) { shared_count += shared; });
  std::vector<double> memory(Schedule::bytes(shared_count, count * key_heads) / sizeof(double) + 1);
  schedule.plan_tasks(memory.data(), shared_count);
  const double whole = time_of_head(schedule.plan_of(0));  // the sequences of a case are equal
  Result result;
  for (int64_t step = 0; step < schedule.steps(); ++step) {
    std::vector<double> tasks, merges;
    for (int64_t task = 0; task < schedule.tasks(step); ++task) {
      if (schedule.is_whole(task, step)) {
        if (!schedule.is_shared(task)) tasks.push_back(whole);
        continue;
      }
      int64_t split = 0;
      const KeyHeadPlan& plan = schedule.split_of(task, step, split);
      const int64_t chunk = schedule.chunk_of(plan, step);
      if (chunk >= 0 && split < plan.splits) tasks.push_back(time_of(plan, split, plan.chunk(chunk), true));
    }
    run_parallel(tasks, workers, result);
    for (int64_t n = 0; n < shared_count; ++n) {
      const KeyHeadPlan& plan = schedule.shared(n);
      const int64_t at = schedule.chunk_of(plan, step);
      if (at < 0) continue;
      const QueryChunk chunk = plan.chunk(at);
      double time = 0;
      for (int64_t span = 0; span < plan.spans; ++span) time += kSummedRow / 2 * rows_of_span(plan, chunk, span);
      const int64_t parts = ceil_div(chunk.rows(), kBlockRows);
      for (int64_t part = 0; part < parts; ++part) merges.push_back(time / static_cast<double>(parts));
    }
    run_parallel(merges, workers, result);
  }
  return result;
}

}  // namespace fa::FA_ISA::grad

int main() {
  using namespace fa::FA_ISA;
  fa::check::ScheduleCase given;
  while (fa::check::read_case(given)) {
    const std::vector<fa::Sequence> sequences(static_cast<size_t>(given.batch), given.sequence);
    const auto simulated = [&](int64_t count) {
      return grad::simulate(sequences.data(), given.batch, given.key_heads, given.group(), count);
    };
    const grad::Result result = simulated(given.workers);
    fa::check::print_idle(result.tasks, result.lost(simulated(1).end, given.workers));
  }
  return 0;
}
