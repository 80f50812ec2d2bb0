// Nobody looks whether the flush failed.
#![deny(unused_must_use)]
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    batch.flush(&Hardware { tlb: &Idle, iotlb: &Idle });
}
