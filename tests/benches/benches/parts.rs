//! How long the parts of a batch take, and a whole hypercall, by batch size.
//!
//! `cargo bench -p quiesce-benches --bench parts`. Instructions of the same parts are
//! printed by `cargo xtask bench --parts`, those of the hypercall by `cargo xtask bench`.

use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gnttab::{Call, Outcome};
use host::{
    parts::{Part, Ready},
    unmaps::{Backend, GRANTS, Setting, Work},
};

fn parts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("parts");
    for part in Part::all() {
        group.throughput(Throughput::Elements(part.pages() as u64));
        group.bench_function(BenchmarkId::from_parameter(part.name()), |bencher| {
            // Lent, since moving a batch takes longer than submitting it.
            bencher.iter_batched_ref(|| part.prepare(), Ready::run, BatchSize::SmallInput);
        });
    }
    group.finish();
}

/// Adds up how long the hypercalls take.
#[derive(Default)]
struct Timed(Duration);

impl Work for Timed {
    fn run<B: Backend>(&mut self, backend: &B, calls: &[Call]) {
        let start = Instant::now();
        for call in calls {
            assert_eq!(backend.call(*call), Outcome::Done);
        }
        self.0 += start.elapsed();
    }
}

fn hypercalls(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hypercall");
    group.sample_size(20);
    group.throughput(Throughput::Elements(u64::from(GRANTS)));
    for batch in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
        for (layout, random) in [("contiguous", false), ("random", true)] {
            let name = BenchmarkId::from_parameter(format!("unmap/{batch}/{layout}"));
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|rounds| {
                    let mut timed = Timed::default();
                    Setting { batch, random }.in_lean(rounds, &mut timed);
                    timed.0
                });
            });
        }
    }
    group.finish();
}

/// There are many rows, and each is short: all of them take about four minutes.
fn briefly() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
}

criterion_group! {
    name = benches;
    config = briefly();
    targets = parts, hypercalls
}
criterion_main!(benches);
