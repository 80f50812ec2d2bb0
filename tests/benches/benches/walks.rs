//! How long a whole-space unmap takes, before and after, in one run.
//!
//! `cargo bench -p quiesce-benches --bench walks`. `cargo xtask bench --walks` prints the
//! ratios of the same pairs, and `cargo xtask walks` the counts, which are exact.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use host::walks::{Pair, Space};

type Side = fn(&Space) -> Result<Duration, String>;

fn walks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("walks");
    group.sample_size(20);
    for pair in Pair::ALL {
        let space = pair.space().expect("the format exists");
        for (side, unmap) in [("before", Space::before as Side), ("after", Space::after)] {
            group.bench_function(BenchmarkId::new(pair.name(), side), |bencher| {
                bencher.iter_custom(|unmaps| {
                    (0..unmaps).map(|_| unmap(&space).expect("nothing stops a walk")).sum()
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, walks);
criterion_main!(benches);
