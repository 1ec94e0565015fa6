//! The order of tokens by their scores: only as much of it is sorted as is looked at.

/// Tokens in descending order of score, equal ones by rising id, sorted as far as was asked.
pub(super) struct Ranking<'a> {
    keys: &'a mut Vec<u64>,
    sorted: usize,
}

impl<'a> Ranking<'a> {
    /// Each time the sorted part is exhausted it grows this many times.
    const GROWTH: usize = 8;
    /// Tokens sorted at first: most nuclei are smaller.
    const START: usize = 64;

    /// A ranking of all tokens.
    pub fn new(scores: &[f32], keys: &'a mut Vec<u64>) -> Self {
        keys.clear();
        keys.extend(scores.iter().enumerate().map(|(id, &score)| order_key(score, id)));
        Self { keys, sorted: 0 }
    }

    /// A ranking of the first tokens alone, which are in their order.
    pub fn of_first(first: impl Iterator<Item = (u32, f32)>, keys: &'a mut Vec<u64>) -> Self {
        keys.clear();
        keys.extend(first.map(|(id, score)| order_key(score, id as usize)));
        let sorted = keys.len();
        Self { keys, sorted }
    }

    /// Tokens that are ranked.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// The key of the token of a rank.
    pub fn key(&mut self, rank: usize) -> u64 {
        if rank >= self.sorted {
            self.sort((self.sorted * Self::GROWTH).max(Self::START).min(self.keys.len()));
        }
        self.keys[rank]
    }

    /// The keys of the first `count` tokens.
    pub fn first(&mut self, count: usize) -> &[u64] {
        if count > self.sorted {
            self.sort(count);
        }
        &self.keys[..count]
    }

    fn sort(&mut self, wanted: usize) {
        let rest = &mut self.keys[self.sorted..];
        let added = wanted - self.sorted;
        if added < rest.len() {
            rest.select_nth_unstable(added);
        }
        rest[..added].sort_unstable();
        self.sorted = wanted;
    }
}

/// A number that rises as the score falls, and with the id among equal scores.
fn order_key(score: f32, id: usize) -> u64 {
    // Adding zero turns -0.0 into 0.0, which it equals.
    let bits = (score + 0.0).to_bits();
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!rising) << 32 | id as u64
}

/// The score of an [`order_key`], of which -0.0 is 0.0.
pub(super) fn key_score(key: u64) -> f32 {
    let rising = !((key >> 32) as u32);
    f32::from_bits(if rising >> 31 == 1 { rising & !(1 << 31) } else { !rising })
}

/// The token of an [`order_key`].
pub(super) fn key_id(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
}

#[cfg(test)]
mod tests {
    use super::super::uniform;
    use super::*;

    #[test]
    fn a_key_tells_its_token_and_its_score() {
        let scores = [0.0, -0.0, 1.5, -1.5, f32::MIN, f32::MAX, f32::NEG_INFINITY, 1e-45, -1e-45];
        for (id, score) in scores.into_iter().enumerate() {
            let key = order_key(score, id);
            assert_eq!((key_id(key), key_score(key)), (id, score));
        }
    }

    #[test]
    fn ranking_is_the_full_sort_however_far_it_is_asked() {
        let scores: Vec<f32> =
            (0..5_000).map(|i| (uniform(7, i) * 40.0).floor() as f32 - 20.0).collect();
        let mut expected: Vec<usize> = (0..scores.len()).collect();
        expected.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let mut keys = Vec::new();
        let mut ranking = Ranking::new(&scores, &mut keys);
        assert_eq!(ranking.first(3).len(), 3);
        assert!((0..scores.len()).map(|rank| key_id(ranking.key(rank))).eq(expected));
    }
}
