// The caller flushes CPUs and forgets that devices exist.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    let _ = batch.flush(&Hardware { tlb: &Idle });
}
