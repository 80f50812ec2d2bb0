//! How long taking a whole table down takes, by mappings and by width.
//!
//! `cargo bench -p quiesce-benches --bench teardown`. The counts of the same lines are
//! exact, and `cargo xtask bench --teardown` prints them beside instructions.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use host::teardown::Teardown;

fn teardowns(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("teardown");
    group.sample_size(20);
    for line in Teardown::all() {
        group.throughput(Throughput::Elements(line.mappings));
        group.bench_function(BenchmarkId::from_parameter(line.name()), |bencher| {
            let prepare = || line.prepare().expect("everything can be mapped");
            // The table goes back to the harness, so that freeing it is not timed.
            let take_down = |standing: host::teardown::Standing| {
                let mut standing = standing;
                let cost = standing.take_down();
                (standing, cost)
            };
            bencher.iter_batched(prepare, take_down, BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, teardowns);
criterion_main!(benches);
