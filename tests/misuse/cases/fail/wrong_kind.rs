// The flusher of devices is used for CPUs.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    let _ = batch.flush(&Hardware { tlb: &NoIommu, iotlb: &NoIommu });
}
