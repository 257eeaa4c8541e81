// The OpenMP team that torch has, for pieces of work that all its threads take from one counter: one
// that lost its core for a while just takes fewer.
#pragma once

typedef void (*Fork)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

template <class Work>
struct Team {
  Work& work;
  int count, next = 0;

  static void run(void* data) {
    Team& team = *static_cast<Team*>(data);
    for (;;) {
      const int piece = __atomic_fetch_add(&team.next, 1, __ATOMIC_RELAXED);
      if (piece >= team.count) return;
      team.work(piece);
    }
  }
};

// `fork` is GOMP_parallel of torch's own OpenMP; none: this thread does all.
template <class Work>
void share(Fork fork, int threads, int count, Work work) {
  Team<Work> team{work, count};
  if (fork != nullptr && threads > 1 && count > 1)
    fork(&Team<Work>::run, &team, unsigned(threads), 0);
  else
    Team<Work>::run(&team);
}
