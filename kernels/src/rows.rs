//! Activations: rows of `f32` that may be part of wider rows.

/// `count` rows of `width` values, one every `stride` values.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [f32],
    count: usize,
    stride: usize,
    width: usize,
}

/// `count` rows of `width` values to write, one every `stride` values.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    count: usize,
    stride: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    /// All of `data` as rows of `width`.
    ///
    /// # Panics
    /// When `data` is not whole rows.
    pub fn new(data: &'a [f32], width: usize) -> Self {
        let count = data.len() / width;
        assert_eq!(count * width, data.len(), "{} values are not rows of {width}", data.len());
        Rows { data, count, stride: width, width }
    }

    /// Columns `from..from + width` of every row.
    ///
    /// # Panics
    /// When the columns leave the rows.
    pub fn columns(self, from: usize, width: usize) -> Self {
        assert!(from + width <= self.width, "columns {from}+{width} leave rows {}", self.width);
        let data = if self.count == 0 { self.data } else { &self.data[from..] };
        Rows { data, width, ..self }
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Values from the start of a row to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `i`.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [f32] {
        assert!(i < self.count, "row {i} of {}", self.count);
        &self.data[i * self.stride..][..self.width]
    }

    /// The values from the first of the first row to the last of the last.
    pub fn data(&self) -> &'a [f32] {
        self.data
    }
}

impl<'a> RowsMut<'a> {
    /// All of `data` as rows of `width`.
    ///
    /// # Panics
    /// When `data` is not whole rows.
    pub fn new(data: &'a mut [f32], width: usize) -> Self {
        let count = data.len() / width;
        assert_eq!(count * width, data.len(), "{} values are not rows of {width}", data.len());
        RowsMut { data, count, stride: width, width }
    }

    /// Columns `from..from + width` of every row.
    ///
    /// # Panics
    /// When the columns leave the rows.
    pub fn columns(self, from: usize, width: usize) -> Self {
        assert!(from + width <= self.width, "columns {from}+{width} leave rows {}", self.width);
        let data = if self.count == 0 { self.data } else { &mut self.data[from..] };
        RowsMut { data, width, ..self }
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Values from the start of a row to the start of the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `i`.
    #[inline]
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.count, "row {i} of {}", self.count);
        &mut self.data[i * self.stride..][..self.width]
    }

    /// The values from the first of the first row to the last of the last.
    pub fn data(&mut self) -> &mut [f32] {
        self.data
    }

    /// The same, for as long as the rows may be written.
    pub(crate) fn into_data(self) -> &'a mut [f32] {
        self.data
    }
}
